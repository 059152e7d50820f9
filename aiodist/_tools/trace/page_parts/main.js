// The page: the trace, what is seen of it, what is selected; one frame for all that changed since the last.

class Page {
  constructor(trace) {
    this.trace = trace;
    this.canvas = byId("timeline");
    this.overviewCanvas = byId("overview");
    this.view = new View(trace.tracks[0]);
    this.painter = new Painter(this.canvas, trace);
    this.overview = new Overview(this.overviewCanvas, trace);
    this.state = { chosen: -1, hovered: null, lane: null, marked: null };
    this.frame = 0;
    fillFacts(trace);
    fillTrouble(trace, (run) => this.change(() => this.goToTrouble(run)));
    fillStragglers(trace, (replica) => this.change(() => this.showLane(replica)));
    fillSites(trace, (site) => this.mark(site && ((text) => text.at === site.at && text.call === site.call)));
    byId("search").addEventListener("input", () => this.search(byId("search").value.trim().toLowerCase()));
    this.offerTracks();
    new Controls(this);
    new ResizeObserver(() => this.resize()).observe(byId("stage"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.change(() => this.painter.readColors()));
    this.resize();
    this.view.fit();
    const many = trace.tracks.length > 1 ? trace.tracks.findIndex((track) => track.runs.some((run) => run.report)) : 0;
    if (many > 0) this.showTrack(many);
  }

  mark(marked) {
    this.change(() => (this.state.marked = marked));
  }

  /** Mark the collectives whose call, place or number has these words, and select the first; Enter goes on. */
  search(words) {
    const { trace } = this;
    this.mark(words ? (text) => `${text.call} ${text.at}`.toLowerCase().includes(words) : null);
    this.hits = words ? [...this.view.track.order].filter((i) => this.state.marked(trace.texts[trace.text[trace.offset[i]]]) || words === `#${trace.number[i]}`) : [];
    byId("found").textContent = words ? formatCount(this.hits.length, "hit") : "";
    this.choose(this.hits.length ? this.hits[0] : -1);
  }

  nextHit(by) {
    if (!this.hits?.length) return;
    const at = this.hits.indexOf(this.state.chosen);
    this.change(() => this.show(this.hits[(at + by + this.hits.length) % this.hits.length]));
  }

  offerTracks() {
    const { tracks } = this.trace, select = byId("track");
    byId("track-label").hidden = tracks.length < 2;
    tracks.forEach((track, at) => {
      const first = track.runs[0], more = track.runs.length > 1 ? ` and ${track.runs.length - 1} more` : "";
      select.append(new Option(`${formatCount(track.lanes, "replica")}: run ${first.number} ${first.name}${more}`, at));
    });
    select.addEventListener("change", () => this.showTrack(+select.value));
  }

  showTrack(at) {
    byId("track").value = at;
    this.choose(-1);
    this.change(() => this.view.show(this.trace.tracks[at]));
  }

  resize() {
    const ratio = window.devicePixelRatio || 1;
    for (const canvas of [this.canvas, this.overviewCanvas]) {
      canvas.width = Math.round(canvas.clientWidth * ratio);
      canvas.height = Math.round(canvas.clientHeight * ratio);
    }
    this.change(() => this.view.resize(this.canvas.clientWidth, this.canvas.clientHeight));
  }

  /** Do something that changes what is to be seen, and draw it in the next frame. */
  change(act) {
    act();
    if (!this.frame) this.frame = requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = 0;
    this.painter.draw(this.view, this.state);
    this.overview.draw(this.view, this.painter.colors, this.overviewCanvas.clientWidth, this.overviewCanvas.clientHeight);
    const { begin: from, end } = this.view, seen = `${formatTime(end - from)} seen`;
    this.canvas.setAttribute("aria-label", `Timeline of ${formatCount(this.view.track.lanes, "replica")}, ${seen}`);
  }

  hover(x, y) {
    const found = x < 0 ? null : pick(this.trace, this.view, x, y), tip = byId("tip");
    tip.hidden = !found;
    if (found) {
      fillTip(this.trace, found);
      const right = x + 16 + tip.offsetWidth > this.view.width, top = this.canvas.offsetTop;
      tip.style.left = `${Math.max(4, right ? x - 14 - tip.offsetWidth : x + 16)}px`;
      tip.style.top = `${top + Math.min(y + 14, this.view.height - tip.offsetHeight - 4)}px`;
    }
    if (found?.collective !== this.state.hovered?.collective) this.change(() => (this.state.hovered = found));
  }

  choose(collective) {
    this.change(() => (this.state.chosen = collective));
    fillChosen(this.trace, collective);
  }

  /** Select the collective before or after the selected one, or the first that is seen. */
  step(by) {
    const { track } = this.view, { order } = track;
    if (!order.length) return;
    const at = order.indexOf(this.state.chosen);
    const [k0, k1] = collectivesBetween(track, this.view.begin, this.view.end);
    const next = at < 0 ? (by > 0 ? k0 : k1 - 1) : at + by;
    if (next >= 0 && next < order.length) this.show(order[next]);
  }

  /** Select a collective, and bring it into view. */
  show(i) {
    this.choose(i);
    if (this.trace.end[i] > this.view.end || this.trace.first[i] < this.view.begin) {
      const half = (this.view.end - this.view.begin) / 2, centre = (this.trace.first[i] + this.trace.end[i]) / 2;
      this.view.span(centre - half, centre + half);
    }
  }

  zoomTo(i) {
    const length = Math.max(1, this.trace.end[i] - this.trace.first[i]);
    this.view.span(this.trace.first[i] - length * 0.4, this.trace.end[i] + length * 0.4);
  }

  zoomToChosen() {
    if (this.state.chosen >= 0) this.zoomTo(this.state.chosen);
  }

  showLane(replica) {
    const { base, lanes } = this.view.track, lane = replica === null || replica < base ? null : replica - base;
    this.state.lane = lane;
    if (lane === null || lane >= lanes) return;
    if (this.view.laneHeight < 6) this.view.zoomLanes(12 / this.view.laneHeight, this.view.y(lane));
    this.view.reveal(lane);
  }

  /** Show a disagreement, the first one unless told: its collective, selected, and the lane of a suspect. */
  goToTrouble(run = this.trace.runs.find((one) => one.report)) {
    if (!run) return;
    const track = this.trace.tracks.findIndex((one) => one.pid === run.pid);
    if (this.trace.tracks[track] !== this.view.track) this.showTrack(track);
    const { report } = run, { order } = this.view.track;
    const met = order.findLast?.((i) => this.trace.run[i] === run.number && this.trace.number[i] === report.number && this.trace.status[i]);
    if (met === undefined) {
      const half = (run.end - run.begin) / 20;
      this.view.span(report.at - half, report.at + half);
    } else {
      this.zoomTo(met);
      this.choose(met);
    }
    if (report.suspects.length && report.suspects.length < this.view.track.lanes) {
      this.state.lane = report.suspects[0];
      this.view.reveal(this.state.lane);
    }
    this.canvas.focus();
  }
}

const trace = readTrace(JSON.parse(byId("data").textContent));
if (trace.tracks.length) window.aiodistPage = new Page(trace);
else {
  fillFacts(trace);
  byId("empty").hidden = false;
  for (const part of document.querySelectorAll("main, header label, header .tools")) part.hidden = true;
}
