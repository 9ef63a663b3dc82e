"""What fetch functions run on: threads of this process, or processes of their own."""
