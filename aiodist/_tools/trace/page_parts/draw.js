// The timeline, drawn anew for every frame: as much detail as there is room for.

const MOST_SHAPES = 5000; // more waits than this are drawn as a raster
const FONT = "12px system-ui, sans-serif";

class Painter {
  constructor(canvas, trace) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.trace = trace;
    this.raster = new Raster();
    this.majorities = new Map();
    this.readColors();
  }

  readColors() {
    const style = getComputedStyle(document.documentElement);
    const names = ["paper", "ink", "soft", "rule", "lane", "lane-alt", "work", "wait", "resume", "link", "late", "bad", "chosen"];
    this.colors = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    const wait = this.colors.wait;
    this.waitRgb = [1, 3, 5].map((at) => parseInt(wait.slice(at, at + 2), 16));
    const kinds = this.trace.kinds;
    this.kindColors = kinds.map((_, at) => style.getPropertyValue(`--kind-${at % 8}`).trim());
    this.textColors = this.trace.texts.map(({ kind }) => this.kindColors[kinds.indexOf(kind)]);
    byId("kinds").replaceChildren(
      ...kinds.map((kind, at) => {
        const key = element("span", undefined, "key");
        key.style.background = this.kindColors[at];
        const item = element("span");
        item.append(key, `${kind} `);
        return item;
      }),
    );
  }

  draw(view, state) {
    const { context, colors } = this, ratio = window.devicePixelRatio || 1;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = colors.paper;
    context.fillRect(0, 0, view.width, view.height);
    context.font = FONT;
    context.textBaseline = "middle";
    const range = collectivesBetween(view.track, view.begin, view.end);
    const [lane0, lane1] = view.lanes;
    const shapes = (range[1] - range[0]) * Math.min(lane1 - lane0, view.track.lanes);
    this.clip(GUTTER, HEAD, view.plotWidth, view.plotHeight, () => {
      this.lanes(view, state);
      this.work(view);
      const many = shapes > MOST_SHAPES || view.laneHeight < 2.5;
      if (many) this.raster.draw(context, this.trace, view, range, this.waitRgb);
      this.waits(view, range, many);
      if (state.lane !== null) this.outline(view, state.lane);
      this.links(view, range, shapes);
      if (state.marked !== null) this.marks(view, range, state.marked);
      this.troubles(view);
      if (state.chosen >= 0) this.chosen(view, state.chosen);
      if (state.hovered && state.hovered.collective !== state.chosen) this.chosen(view, state.hovered.collective, 0.55);
    });
    this.axis(view);
    this.gutter(view, state);
  }

  clip(x, y, width, height, paint) {
    this.context.save();
    this.context.beginPath();
    this.context.rect(x, y, width, height);
    this.context.clip();
    paint();
    this.context.restore();
  }

  lanes(view, state) {
    const { context, colors } = this, [lane0, lane1] = view.lanes;
    if (view.laneHeight >= 5) {
      for (let lane = lane0; lane < lane1; lane += 1) {
        context.fillStyle = lane % 2 ? colors["lane-alt"] : colors.lane;
        context.fillRect(GUTTER, view.y(lane), view.plotWidth, view.laneHeight - 1);
      }
    } else {
      context.fillStyle = colors.lane;
      context.fillRect(GUTTER, view.y(lane0), view.plotWidth, (lane1 - lane0) * view.laneHeight);
    }
    this.suspects(view);
  }

  outline(view, lane) {
    this.context.strokeStyle = this.colors.chosen;
    this.context.lineWidth = 1;
    this.context.strokeRect(GUTTER + 0.5, view.y(lane) - 1.5, view.plotWidth - 1, Math.max(3, view.laneHeight + 1));
  }

  /** Tint the lanes of those who differ from the rest. */
  suspects(view) {
    const { context, colors } = this;
    context.fillStyle = colors.bad;
    context.globalAlpha = 0.25;
    for (const { report } of view.track.runs) {
      if (!report || report.suspects.length === view.track.lanes) continue;
      for (const lane of report.suspects) context.fillRect(GUTTER, view.y(lane), view.plotWidth, Math.max(1, view.laneHeight - 1));
    }
    context.globalAlpha = 1;
  }

  /** Draw when each replica's function was at work: the ground that waits stand on. */
  work(view) {
    const { context, colors } = this, [lane0, lane1] = view.lanes, inset = view.laneHeight >= 8 ? 2 : 0;
    context.fillStyle = colors.work;
    for (const run of view.track.runs) {
      if (run.end < view.begin || run.begin > view.end) continue;
      const step = Math.max(1, Math.floor(1 / view.laneHeight));
      for (let lane = lane0; lane < Math.min(lane1, run.started.length); lane += step) {
        const x0 = Math.max(GUTTER, view.x(run.started[lane])), x1 = Math.min(view.width, view.x(run.ended[lane]));
        if (x1 >= x0) context.fillRect(x0, view.y(lane) + inset, Math.max(0.7, x1 - x0), Math.max(0.6, step * view.laneHeight - 1 - 2 * inset));
      }
    }
  }

  /** Draw waits one by one: all of them, or only those that ended in an error. */
  waits(view, [k0, k1], onlyFailed) {
    const { context, colors, trace } = this, { order } = view.track, [lane0, lane1] = view.lanes;
    const inset = view.laneHeight >= 8 ? 2 : 0, height = Math.max(1, view.laneHeight - 1 - 2 * inset);
    for (let k = k0; k < k1; k += 1) {
      const i = order[k], first = trace.first[i];
      if (onlyFailed && !trace.status[i]) continue;
      for (let j = trace.offset[i]; j < trace.offset[i + 1]; j += 1) {
        const lane = trace.lane[j];
        if (lane < lane0 || lane >= lane1) continue;
        const y = view.y(lane) + inset, begin = view.x(first + trace.awaited[j]);
        const until = view.x(first + trace.awaited[j] + trace.wait[j]), end = view.x(first + trace.resumed[j]);
        if (end < GUTTER || begin > view.width) continue;
        const x0 = Math.max(GUTTER - 2, begin), x1 = Math.min(view.width + 2, until);
        if (end - until > 0.5) {
          context.fillStyle = colors.resume;
          context.fillRect(Math.max(x0, until), y, Math.min(end, view.width) - Math.max(x0, until), height);
        }
        if (trace.wait[j] > 0) {
          context.fillStyle = trace.status[i] ? colors.bad : this.textColors[trace.text[j]];
          context.globalAlpha = trace.status[i] && trace.text[j] === this.majority(i) ? 0.6 : 1;
          context.fillRect(x0, y, Math.max(0.8, x1 - x0), height);
          context.globalAlpha = 1;
        }
        if (height >= 11 && x1 - x0 > 46) this.label(i, j, x0, x1, y + height / 2);
      }
    }
  }

  /** Return what most replicas asked for in a collective that failed; -1 if all did. */
  majority(i) {
    if (!this.majorities.has(i)) {
      const found = partitions(this.trace, i);
      this.majorities.set(i, found.length > 1 ? found[0].text : -1);
    }
    return this.majorities.get(i);
  }

  label(i, j, x0, x1, y) {
    const { context, trace } = this, { kind } = trace.texts[trace.text[j]];
    const text = `${kind} #${trace.number[i]}`, room = x1 - x0 - 8;
    const shown = context.measureText(text).width <= room ? text : `#${trace.number[i]}`;
    if (context.measureText(shown).width > room) return;
    context.fillStyle = trace.status[i] ? "#fff" : "#1d1405";
    context.fillText(shown, x0 + 4, y + 0.5);
  }

  /** Draw each collective as a line across its lanes where it was complete, and mark who came last. */
  links(view, [k0, k1], shapes) {
    const { context, colors, trace } = this, { order } = view.track, [lane0, lane1] = view.lanes;
    const perPixel = (k1 - k0) / view.plotWidth;
    if (perPixel > 0.3) return; // they would be all that is seen
    let drawn = -Infinity;
    context.globalAlpha = 0.85;
    context.fillStyle = colors.link;
    for (let k = k0; k < k1; k += 1) {
      const i = order[k], x = view.x(trace.completed[i]);
      if (x < GUTTER - 1 || x > view.width + 1 || x - drawn < 2.5 || trace.status[i]) continue;
      drawn = x;
      const [top, bottom] = this.extent(i);
      context.fillRect(x - 0.5, view.y(Math.max(top, lane0 - 1)), 1, (Math.min(bottom, lane1) + 1 - Math.max(top, lane0 - 1)) * view.laneHeight - 1);
    }
    context.globalAlpha = 1;
    if (shapes > MOST_SHAPES || view.laneHeight < 6) return;
    context.fillStyle = colors.late;
    for (let k = k0; k < k1; k += 1) {
      const i = order[k], last = trace.last[i], j = arrivalOf(trace, i, last);
      if (trace.status[i] || j < 0 || trace.offset[i + 1] - trace.offset[i] < 2) continue;
      this.dot(view.x(trace.first[i] + trace.issued[j]), view.y(last) + view.laneHeight / 2, Math.min(4, view.laneHeight / 4));
    }
  }

  dot(x, y, radius) {
    this.context.beginPath();
    this.context.arc(x, y, radius, 0, 7);
    this.context.fill();
  }

  /** Return the topmost and the undermost lane of a collective. */
  extent(i) {
    const { trace } = this, begin = trace.offset[i], end = trace.offset[i + 1];
    if (end - begin === trace.lane[end - 1] - trace.lane[begin] + 1) return [trace.lane[begin], trace.lane[end - 1]];
    let top = Infinity, bottom = -1;
    for (let j = begin; j < end; j += 1) {
      top = Math.min(top, trace.lane[j]);
      bottom = Math.max(bottom, trace.lane[j]);
    }
    return [top, bottom];
  }

  /** Mark the collectives whose first call is one of the marked texts: those of a call site, or of a search. */
  marks(view, [k0, k1], marked) {
    const { context, colors, trace } = this, { order } = view.track;
    context.fillStyle = colors.chosen;
    let drawn = -Infinity;
    for (let k = k0; k < k1; k += 1) {
      const i = order[k], x = view.x(trace.completed[i]);
      if (!marked(trace.texts[trace.text[trace.offset[i]]]) || x - drawn < 2) continue;
      drawn = x;
      context.fillRect(x - 1, HEAD, 2, view.plotHeight);
    }
  }

  /** Mark reports, and replicas that ended otherwise than by returning. */
  troubles(view) {
    const { context, colors } = this;
    for (const run of view.track.runs) {
      const report = run.report;
      if (report) {
        const x = view.x(report.at);
        context.fillStyle = colors.bad;
        context.fillRect(x - 1, HEAD, 2, view.plotHeight);
      }
      for (const [lane, error] of Object.entries(run.errors)) {
        context.fillStyle = colors.bad;
        const x = view.x(run.ended[lane]), y = view.y(+lane);
        context.fillRect(x - 1.5, y, 3, Math.max(3, view.laneHeight));
        if (view.laneHeight >= 12) context.fillText(` ${error.slice(0, 90)}`, x + 4, y + view.laneHeight / 2);
      }
    }
  }

  /** Outline one collective: who came when, as a line from lane to lane, and when it was complete. */
  chosen(view, i, alpha = 1) {
    const { context, colors, trace } = this, begin = trace.offset[i], end = trace.offset[i + 1];
    const order = [];
    for (let j = begin; j < end; j += 1) order.push(j);
    order.sort((a, b) => trace.lane[a] - trace.lane[b]);
    const color = trace.status[i] ? colors.bad : colors.chosen;
    const middle = (j) => view.y(trace.lane[j]) + view.laneHeight / 2;
    context.save();
    context.globalAlpha = alpha;
    context.strokeStyle = context.fillStyle = color;
    context.lineWidth = 2;
    context.beginPath();
    for (const j of order) context.lineTo(view.x(trace.first[i] + trace.issued[j]), middle(j));
    context.stroke();
    const [top, bottom] = this.extent(i), x = view.x(trace.completed[i]);
    context.fillRect(x - 1, view.y(top), 2, (bottom - top + 1) * view.laneHeight);
    context.globalAlpha = alpha * 0.12;
    context.beginPath();
    for (const j of order) context.lineTo(view.x(trace.first[i] + trace.issued[j]), middle(j));
    context.lineTo(x, view.y(bottom) + view.laneHeight);
    context.lineTo(x, view.y(top));
    context.fill();
    context.globalAlpha = alpha;
    if (view.laneHeight >= 6) for (const j of order) this.dot(view.x(trace.first[i] + trace.issued[j]), middle(j), 2.5);
    context.restore();
  }

  axis(view) {
    const { context, colors } = this;
    context.fillStyle = colors.paper;
    context.fillRect(GUTTER, 0, view.plotWidth, HEAD);
    const raw = (90 / view.plotWidth) * (view.end - view.begin), power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= raw);
    context.fillStyle = colors.soft;
    for (let mark = Math.ceil(view.begin / step); mark * step <= view.end; mark += 1) {
      const x = view.x(mark * step);
      context.fillRect(x, 20, 1, 5);
      context.fillText(formatTick(mark * step, step), x + 4, 12);
    }
    this.clip(GUTTER, 0, view.plotWidth, HEAD, () => this.runs(view));
    context.fillStyle = colors.rule;
    context.fillRect(0, HEAD - 1, view.width, 1);
  }

  runs(view) {
    const { context, colors } = this;
    for (const run of view.track.runs) {
      const x0 = Math.max(view.x(run.begin), GUTTER), x1 = Math.min(view.x(run.end), view.width);
      if (x1 < GUTTER || x0 > view.width) continue;
      context.fillStyle = run.report || Object.keys(run.errors).length ? colors.bad : colors.resume;
      context.fillRect(x0, 26, Math.max(1, x1 - x0 - 1), 15);
      const text = `run ${run.number}: ${run.name}`;
      if (context.measureText(text).width > x1 - x0 - 8) continue;
      context.fillStyle = run.report || Object.keys(run.errors).length ? colors.paper : colors.ink;
      context.fillText(text, x0 + 4, 34);
    }
  }

  gutter(view, state) {
    const { context, colors } = this, { base, devices } = view.track, [lane0, lane1] = view.lanes;
    context.fillStyle = colors.paper;
    context.fillRect(0, 0, GUTTER, view.height);
    context.fillStyle = colors.soft;
    context.fillText(formatCount(devices.length, "replica"), 10, 12);
    context.textAlign = "right";
    const step = Math.max(1, Math.ceil(15 / view.laneHeight));
    for (let lane = Math.ceil(lane0 / step) * step; lane < lane1; lane += step) {
      const y = view.y(lane) + view.laneHeight / 2;
      if (y < HEAD + 4 || y > view.height - 4) continue;
      if (state.lane !== null && lane !== state.lane && Math.abs(view.y(lane) - view.y(state.lane)) < 15) continue;
      this.laneName(base + lane, devices[lane], y, colors.soft, colors.ink);
    }
    if (state.lane !== null && state.lane < devices.length) {
      const y = view.y(state.lane) + view.laneHeight / 2;
      if (y > HEAD) this.laneName(base + state.lane, devices[state.lane], y, colors.chosen, colors.chosen);
    }
    context.textAlign = "left";
    context.fillStyle = colors.rule;
    context.fillRect(0, HEAD - 1, GUTTER, 1);
    this.scrollbar(view);
  }

  laneName(replica, device, y, soft, strong) {
    const { context } = this;
    context.fillStyle = soft;
    context.fillText(device, GUTTER - 8, y);
    context.fillStyle = strong;
    context.fillText(String(replica), GUTTER - 16 - context.measureText(device).width, y);
  }

  scrollbar(view) {
    const whole = view.track.lanes * view.laneHeight;
    if (whole <= view.plotHeight + 1) return;
    const height = Math.max(24, (view.plotHeight * view.plotHeight) / whole);
    const top = HEAD + (view.scroll / (whole - view.plotHeight)) * (view.plotHeight - height);
    this.context.fillStyle = this.colors.soft;
    this.context.globalAlpha = 0.45;
    this.context.fillRect(view.width - 7, top, 5, height);
    this.context.globalAlpha = 1;
  }
}

/** The whole of a track above its timeline: how much was waited when, and what of it is to be seen below. */
class Overview {
  constructor(canvas, trace) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.trace = trace;
    this.levels = null;
  }

  /** Return how much all replicas waited in each column: a raster of one row over the whole track. */
  count(track, columns) {
    const raster = new Raster(), view = { track, begin: track.begin, scale: columns / (track.end - track.begin) };
    raster.add(this.trace, view, 0, track.order.length, 0, track.lanes, columns, 1);
    const levels = raster.covered;
    for (let x = 1; x < columns; x += 1) levels[x] += levels[x - 1];
    return levels;
  }

  draw(view, colors, width, height) {
    const columns = Math.max(1, Math.floor(width - GUTTER)), ratio = window.devicePixelRatio || 1, { context } = this;
    if (!this.levels || this.track !== view.track || this.columns !== columns) {
      this.track = view.track;
      this.columns = columns;
      this.levels = this.count(view.track, columns);
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = colors.paper;
    context.fillRect(0, 0, width, height);
    context.fillStyle = colors.wait;
    for (let x = 0; x < columns; x += 1) {
      const level = Math.min(1, this.levels[x] / view.track.lanes) * (height - 6);
      if (level > 0.2) context.fillRect(GUTTER + x, height - level, 1, level);
    }
    for (const run of view.track.runs) {
      if (!run.report) continue;
      context.fillStyle = colors.bad;
      context.fillRect(GUTTER + ((run.report.at - view.track.begin) / (view.track.end - view.track.begin)) * columns - 1, 0, 3, height);
    }
    const x = (time) => GUTTER + ((time - view.track.begin) / (view.track.end - view.track.begin)) * columns;
    const x0 = Math.max(GUTTER, x(view.begin)), x1 = Math.min(width, x(view.end));
    context.fillStyle = colors.link;
    context.globalAlpha = 0.14;
    context.fillRect(x0, 0, x1 - x0, height);
    context.globalAlpha = 1;
    context.strokeStyle = colors.link;
    context.strokeRect(x0 + 0.5, 0.5, Math.max(2, x1 - x0 - 1), height - 1);
    context.fillStyle = colors.soft;
    context.font = FONT;
    context.textBaseline = "middle";
    context.fillText("waiting", 10, height / 2);
  }
}
