"use strict";
// Asks for stats.json once a second and draws it. Whatever comes is set as text, never as markup.

const EVERY_MS = 1000;
const ANSWER_MS = 4000;
const RATED = 6; // readings that a rate of a table is taken over
const TONES = {
  "trainer-bound": "good", ended: "good", starting: "idle", waiting: "idle", stopped: "idle",
  failed: "bad", "failing-fetch": "bad", "stalled-queue": "bad",
};
const SLOW = new Set(["fetch-bound", "slow-worker"]);
const recent = []; // the last readings of figures
const sections = new Map();
let answeredAt = null;

const at = (root, name) => root.querySelector(`[data-is="${name}"]`);
const per = (part, whole) => (whole > 0 ? part / whole : 0);
const percent = (share) => `${Math.round(100 * Math.min(1, Math.max(0, share)))} %`;

function short(value) {
  if (value >= 99950) return `${(value / 1000).toFixed(0)} k`;
  if (value >= 9995) return `${(value / 1000).toFixed(1)} k`;
  if (value >= 100 || Number.isInteger(value)) return value.toFixed(0);
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

function size(bytes) {
  for (const unit of ["B", "kB", "MB"]) {
    if (bytes < 999.5) return `${bytes < 9.95 && unit !== "B" ? bytes.toFixed(1) : bytes.toFixed(0)} ${unit}`;
    bytes /= 1000;
  }
  return `${bytes.toFixed(bytes < 9.95 ? 2 : 1)} GB`;
}

function time(seconds) {
  if (seconds >= 5400) return `${(seconds / 3600).toFixed(1)} h`;
  if (seconds >= 100) return `${Math.round(seconds / 60)} min`;
  if (seconds >= 1) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds >= 0.001) return `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  return `${Math.round(1e6 * seconds)} µs`;
}

function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const titleOf = (feed) => (feed.number ? `${feed.name}#${feed.number}` : feed.name);

// What a feed was at the first of the recent readings; null where it has begun anew since.
function before(feed) {
  const old = recent[0].feeds.find((other) => titleOf(other) === titleOf(feed));
  return old && old.batches <= feed.batches && old.age_s <= feed.age_s ? old : null;
}

function draw(everything) {
  const { figures, verdicts, history } = everything;
  if (recent.length && recent.at(-1).who !== figures.who) recent.length = 0;
  recent.push(figures);
  if (recent.length > RATED) recent.shift();
  say(document.getElementById("version"), figures.version);
  say(document.getElementById("who"), figures.who);
  const titles = figures.feeds.map(titleOf);
  for (const [title, section] of sections) {
    if (!titles.includes(title)) { section.remove(); sections.delete(title); }
  }
  for (const feed of figures.feeds) {
    const title = titleOf(feed);
    drawFeed(sectionOf(title), feed, verdicts[title], history[title] ?? [], figures);
  }
  const kinds = Object.values(verdicts).map((verdict) => verdict.kind);
  document.title = kinds.length ? `${kinds.join(", ")} · feeder` : "feeder";
}

function sectionOf(title) {
  if (!sections.has(title)) {
    const section = document.getElementById("feed").content.firstElementChild.cloneNode(true);
    section.dataset.feed = title;
    say(at(section, "title"), title);
    document.getElementById("feeds").append(section);
    sections.set(title, section);
  }
  return sections.get(title);
}

function drawFeed(section, feed, verdict, points, figures) {
  const state = at(section, "state");
  say(state, feed.state);
  state.dataset.state = feed.state;
  if (verdict) {
    at(section, "verdict").dataset.tone = TONES[verdict.kind] ?? "slow";
    say(at(section, "kind"), verdict.kind);
    say(at(section, "why"), verdict.why);
    say(at(section, "advice"), verdict.advice);
  }
  const old = before(feed);
  const seconds = old ? figures.at_s - recent[0].at_s : feed.age_s;
  drawTiles(section, feed, points);
  drawCharts(section, points);
  drawQueues(at(section, "queues"), feed, old, seconds);
  drawWorkers(at(section, "workers"), feed, old, seconds, SLOW.has(verdict?.kind));
  const left = feed.skipped ? `${feed.skipped} records left out` : "";
  const told = [tellExecutor(feed.executor), left, tellStore(feed.store, old?.store, seconds)];
  say(at(section, "executor"), told.filter(Boolean).join("; "));
  say(at(section, "service"), tellService(feed));
}

function tellExecutor(executor) {
  if (!executor) return "";
  const { kind = "processes", processes, busy, restarts, bytes, nodes = [] } = executor;
  const where = nodes.map(([name, number]) => `, ${name}: ${number}`).join("");
  return (
    `${kind} ${busy} of ${processes} busy, ${restarts} restarts, ${size(bytes)} shared${where}`
  );
}

function tellStore(store, old, seconds) {
  if (!store) return "";
  const grown = (name) => store[name] - (old?.[name] ?? 0);
  const found = per(grown("hits"), grown("hits") + grown("waits"));
  return (
    `store ${size(per(grown("bytes"), seconds))}/s in ${short(per(grown("requests"), seconds))} ` +
    `requests/s, ${store.retries} retries, ${percent(found)} of reads found their block, ` +
    `${size(store.ahead)} ahead, blocks coming ${store.coming}, wanted ${store.wanted}`
  );
}

function drawTiles(section, feed, points) {
  const [, batches, bytes, waits] = points.at(-1) ?? [0, 0, 0, 0];
  const handed = feed.queues.reduce((sum, queue) => sum + queue.batches, 0);
  say(at(section, "batches"), short(batches));
  say(at(section, "bytes"), size(bytes));
  say(at(section, "waits"), percent(waits));
  say(at(section, "fill"), percent(per(feed.buffered_rows, feed.limit_rows)));
  say(at(section, "handed"), short(handed));
  say(at(section, "p99"), time(Math.max(0, ...feed.queues.map((queue) => queue.wait_p99_s ?? 0))));
  drawProgress(section, feed.progress, batches);
  say(at(section, "position"), feed.age_s ? `${time(feed.position_age_s)} ago` : "–");
}

function drawProgress(section, progress, rate) {
  const { epoch, epochs, batches, length } = progress ?? {};
  const known = progress && length > 0;
  say(at(section, "epoch"), progress ? `${epoch + 1}${epochs ? ` of ${epochs}` : ""}` : "");
  say(at(section, "progress"), known ? percent(batches / length) : progress ? short(batches) : "–");
  const left = known ? length - batches : 0;
  const sources = progress?.sources ?? [];
  const all = sources.reduce((sum, source) => sum + source.rows, 0);
  say(at(section, "sources"), sources.map(({ name, rows, skipped }) =>
    `${name} ${percent(rows / Math.max(1, all))}${skipped ? `, ${short(skipped)} skipped` : ""}`).join(" · "));
  say(at(section, "eta"), left > 0 && rate > 0 ? `ends in about ${time(left / rate)}` : "");
}

function drawCharts(section, points) {
  const flow = points.map((point) => point[1]);
  const most = Math.max(1e-9, ...flow);
  curve(section.querySelector(".flow"), flow.map((value) => value / most));
  curve(section.querySelector(".wait"), points.map((point) => point[3]));
  say(at(section, "peak"), points.length ? `peak ${short(most < 1e-8 ? 0 : most)}` : "");
  const long = points.length > 1 ? `${time(points.at(-1)[0] - points[0][0])} ago` : "";
  section.querySelectorAll('[data-is="span"]').forEach((node) => say(node, long));
}

function curve(svg, shares) {
  const step = 300 / Math.max(1, shares.length - 1);
  const spots = shares.map((share, i) => `${(i * step).toFixed(1)},${(98 - 94 * share).toFixed(1)}`);
  const line = spots.length > 1 ? `M${spots.join("L")}` : "";
  svg.querySelector(".line").setAttribute("d", line);
  svg.querySelector(".area").setAttribute("d", line ? `${line}L300,100L0,100Z` : "");
}

function nameOf(queue) {
  return queue.replica === undefined ? String(queue.queue) : `${queue.queue}.${queue.replica}`;
}

function drawQueues(body, feed, old, seconds) {
  rows(body, feed.queues.length, 5);
  feed.queues.forEach((queue, i) => {
    const was = old?.queues.find((other) => nameOf(other) === nameOf(queue));
    const cells = body.rows[i].cells;
    const taken = queue.batches - (was ? was.batches : 0);
    say(cells[0], nameOf(queue));
    bar(cells[1], per(queue.waiting, queue.capacity), queue.capacity ? `${queue.waiting} of ${queue.capacity}` : `${queue.waiting}`);
    say(cells[2], short(per(taken, seconds)));
    say(cells[3], percent(per(queue.wait_s - (was ? was.wait_s : 0), seconds)));
    const consumer = queue.consumer;
    say(cells[4], consumer ? `${consumer.who}${consumer.plane ? `, ${consumer.plane}` : ""}` : feed.service ? "nobody" : "in process");
    cells[4].className = "roomy name";
    cells[4].title = cells[4].textContent;
  });
}

function drawWorkers(body, feed, old, seconds, isSlow) {
  rows(body, feed.workers.length, 6);
  const parts = feed.workers.map((worker) => {
    const was = old?.workers.find((other) => other.worker === worker.worker);
    const grown = (name) => worker[name] - (was ? was[name] : 0);
    return { worker, calls: grown("calls"), fetch: grown("fetch_s"), waited: grown("wait_s"), errors: worker.errors };
  });
  const longest = Math.max(...parts.map((part) => per(part.fetch, Math.max(1, part.calls))));
  parts.forEach((part, i) => {
    const row = body.rows[i], cells = row.cells;
    const call = per(part.fetch, Math.max(1, part.calls));
    row.className = isSlow && parts.length > 1 && call === longest && call > 0 ? "worst" : "";
    say(cells[0], String(part.worker.worker));
    bar(cells[1], per(part.fetch, seconds), percent(per(part.fetch, seconds)));
    say(cells[2], call ? time(call) : "–");
    say(cells[3], short(per(part.calls, seconds)));
    say(cells[4], percent(per(part.waited, seconds)));
    say(cells[5], short(part.errors));
    cells[4].className = cells[5].className = "roomy";
  });
}

function rows(body, count, columns) {
  while (body.rows.length > count) body.deleteRow(-1);
  while (body.rows.length < count) {
    const row = body.insertRow();
    for (let i = 0; i < columns; i++) row.insertCell();
    row.cells[1].className = "wide";
  }
}

function bar(cell, share, text) {
  if (!cell.firstChild) {
    const box = document.createElement("div");
    box.className = "bar";
    box.append(document.createElement("i"), document.createElement("span"));
    box.firstChild.append(document.createElement("b"));
    cell.append(box);
  }
  cell.querySelector("b").style.width = `${Math.min(100, 100 * share)}%`;
  say(cell.querySelector("span"), text);
}

function tellService({ service, checkpoint }) {
  const stored = checkpoint
    ? [`last checkpoint ${time(checkpoint.age_s)} ago`, `checkpoints failed ${checkpoint.failures}`] : [];
  if (!service) return stored.join(" · ");
  return [
    ...stored, `sessions ${service.opened}`, `reopened ${service.reopened}`, `leases taken over ${service.fenced}`,
    `expired ${service.expired}`, `rewinds ${service.rewinds}`, `shared memory ${size(service.arena_bytes)}`,
  ].join(" · ");
}

function tellLink(state, text) {
  const link = document.getElementById("link");
  link.dataset.state = state;
  say(link, text);
  document.body.classList.toggle("stale", state !== "live");
}

async function refresh() {
  try {
    const response = await fetch("stats.json", { cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) });
    if (!response.ok) throw new Error((await response.text()).trim());
    draw(await response.json());
    answeredAt = Date.now();
    tellLink("live", "live");
  } catch (error) {
    const since = answeredAt === null ? "" : ` for ${time((Date.now() - answeredAt) / 1000)}`;
    tellLink("lost", `no answer${since}, trying again`);
  }
  setTimeout(refresh, EVERY_MS);
}

refresh();
