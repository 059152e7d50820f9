// What stands beside the timeline as text: the facts, the disagreement, tables, the selected collective, the tip.

function element(tag, text, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
}

const byId = (id) => document.getElementById(id);

function fillFacts(trace) {
  document.title = `${trace.name} · aiodist trace`;
  byId("title").textContent = trace.name;
  const facts = [formatCount(trace.runs.length, "run"), formatCount(trace.first.length, "collective"), formatCount(trace.lane.length, "call")];
  byId("facts").textContent = `${facts.join(" · ")} · traced ${new Date(trace.about.began).toLocaleString()}`;
}

function fillTrouble(trace, go) {
  const runs = trace.runs.filter((one) => one.report || Object.keys(one.errors).length);
  byId("trouble").hidden = !runs.length;
  byId("trouble").append(...runs.slice(0, 20).map((run, at) => trouble(run, trace.runs.length > 1, at === 0, go)));
}

/** Return the report on a run, whole: its first line, and the rest to open and close. */
function trouble(run, several, open, go) {
  const [head, ...rest] = (run.report ? `${run.report.error}: ${run.report.text}` : run.outcome).split("\n");
  const found = element("details"), summary = element("summary"), text = element("pre");
  found.open = open && rest.length > 0;
  summary.append(element("strong", several ? `run ${run.number}: ${head}` : head));
  if (run.report) {
    const button = summary.appendChild(element("button", "Show it (e)"));
    button.addEventListener("click", (event) => {
      event.preventDefault();
      go(run);
    });
  }
  text.tabIndex = 0;
  text.ariaLabel = "Report";
  for (const line of rest) {
    const style = line.startsWith(">") ? "bad" : /^ {4}/.test(line) ? "source" : /^ /.test(line) ? "good" : "";
    text.append(element("span", `${line}\n`, style));
  }
  found.append(summary, text);
  return found;
}

/** Fill a table; each row is its cells, the part of its bar, and what to do when it is chosen. */
function fillTable(table, names, rows) {
  const head = element("tr");
  for (const name of names) head.append(Object.assign(element("th", name), { scope: "col" }));
  const body = element("tbody");
  const most = Math.max(...rows.map((row) => row.part), 1e-12);
  for (const row of rows.slice(0, 500)) {
    const line = element("tr");
    line.tabIndex = 0;
    row.cells.forEach(([text, small], at) => {
      const cell = element("td", text);
      if (small) cell.append(element("small", small));
      if (at === 1) {
        cell.className = "bar";
        cell.style.setProperty("--part", `${(100 * row.part) / most}%`);
      }
      line.append(cell);
    });
    const choose = () => {
      const chosen = line.getAttribute("aria-selected") === "true";
      for (const other of body.rows) other.removeAttribute("aria-selected");
      if (!chosen) line.setAttribute("aria-selected", "true");
      row.choose(!chosen);
    };
    line.addEventListener("click", choose);
    line.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        choose();
      }
    });
    body.append(line);
  }
  if (rows.length > 500) body.append(element("tr", `… and ${rows.length - 500} more`));
  table.replaceChildren(element("thead"), body);
  table.tHead.append(head);
}

function fillStragglers(trace, choose) {
  const rows = trace.statistics.replicas.map((row) => ({
    part: row.held_up_seconds,
    cells: [
      [`${row.replica}`, row.device],
      [formatTime(row.held_up_seconds * 1e6)],
      [`${row.last} of ${row.collectives}`],
      [formatTime(row.own_seconds * 1e6)],
      [formatTime(row.wait_seconds * 1e6)],
    ],
    choose: (on) => choose(on ? row.replica : null),
  }));
  fillTable(byId("stragglers"), ["replica", "held up", "came last", "own time", "waited"], rows);
}

function fillSites(trace, choose) {
  const rows = trace.statistics.sites.map((row) => ({
    part: row.wait_seconds,
    cells: [
      [row.call, row.at],
      [formatTime(row.wait_seconds * 1e6)],
      [formatTime(row.largest_wait_seconds * 1e6)],
      [`${row.count}`],
      [formatBytes(row.nbytes)],
    ],
    choose: (on) => choose(on ? row : null),
  }));
  fillTable(byId("sites"), ["call", "waited", "longest", "times", "bytes"], rows);
}

function fillChosen(trace, i) {
  const section = byId("chosen");
  section.hidden = i < 0;
  if (i < 0) return;
  const { total, longest } = totalWait(trace, i), found = partitions(trace, i), begin = trace.offset[i], end = trace.offset[i + 1];
  const list = element("dl");
  const add = (name, text, style) => list.append(element("dt", name), element("dd", text, style));
  const run = trace.runByNumber.get(trace.run[i]), last = run.base + trace.last[i];
  add("run", `${run.number}: ${run.name}`);
  if (found.length > 1) for (const partition of found) add(formatReplicas(partition.replicas), `${partition.call} at ${partition.at}`, "bad");
  else add("at", found[0].at);
  if (trace.status[i]) add("ended", trace.status[i] === 2 ? "it was never complete" : `${run.outcome}`, "bad");
  const order = [];
  for (let j = begin; j < end; j += 1) order.push(j);
  order.sort((a, b) => trace.issued[a] - trace.issued[b]);
  add("first call", formatTime(trace.first[i] - run.begin) + " into the run");
  add("last call", `replica ${last}, ${formatTime(trace.issued[order[order.length - 1]])} later`);
  add("waited", `${formatTime(total)} in all, ${formatTime(longest)} the longest`);
  add("bytes", formatBytes(trace.bytes[i]));
  const few = order.length <= 12 ? order : [...order.slice(0, 5), -1, ...order.slice(-6)];
  add("came", few.map((j) => (j < 0 ? "…" : replicaOf(trace, i, trace.lane[j]))).join(", "));
  section.replaceChildren(element("h2", "Collective"), element("b", describe(trace, i)), list);
  byId("said").textContent = `${describe(trace, i)}, ${formatTime(total)} waited in all, replica ${last} came last`;
}

function fillTip(trace, { collective: i, arrival: j, lane }) {
  const tip = byId("tip"), { total } = totalWait(trace, i);
  const text = trace.texts[trace.text[j < 0 ? trace.offset[i] : j]], group = trace.group[i];
  const lines = [element("b", `${text.call} #${trace.number[i]}`), element("div", text.at)];
  if (group) lines.push(element("div", group));
  if (j >= 0) {
    const wait = trace.wait[j], came = lane === trace.last[i] ? "came last" : `waited ${formatTime(wait)}`;
    lines.push(element("div", `replica ${replicaOf(trace, i, lane)} ${came}`, "now"));
  } else lines.push(element("div", `replica ${replicaOf(trace, i, lane)} did not take part`, "now"));
  lines.push(element("div", `${formatTime(total)} waited in all · last: replica ${replicaOf(trace, i, trace.last[i])} · ${formatBytes(trace.bytes[i])}`));
  if (trace.status[i]) lines.push(element("div", trace.status[i] === 2 ? "never complete" : "not the same on all replicas", "bad"));
  tip.replaceChildren(...lines);
}
