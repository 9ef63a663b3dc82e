"""Steps: records that are made of other records, by the numbers of these alone."""
