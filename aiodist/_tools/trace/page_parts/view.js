// What is to be seen: a stretch of time, and of lanes.

const GUTTER = 118; // the lanes' names
const HEAD = 44; // the axis, and below it the runs
const MOST_LANE = 160; // where there are few replicas, lanes have the whole height up to this

class View {
  constructor(track) {
    this.width = 800;
    this.height = 400;
    this.show(track);
  }

  show(track) {
    this.track = track;
    this.fit();
  }

  fit() {
    const margin = (this.track.end - this.track.begin) * 0.02;
    this.begin = this.track.begin - margin;
    this.end = this.track.end + margin;
    this.laneHeight = this.fitHeight;
    this.scroll = 0;
  }

  resize(width, height) {
    const fitted = this.laneHeight <= this.fitHeight;
    this.width = width;
    this.height = height;
    if (fitted) this.laneHeight = this.fitHeight;
    this.keepWithin();
  }

  get plotWidth() { return Math.max(1, this.width - GUTTER); }
  get plotHeight() { return Math.max(1, this.height - HEAD); }
  get fitHeight() { return Math.min(MOST_LANE, this.plotHeight / this.track.lanes); }
  get scale() { return this.plotWidth / (this.end - this.begin); }
  x(time) { return GUTTER + (time - this.begin) * this.scale; }
  time(x) { return this.begin + (x - GUTTER) / this.scale; }
  y(lane) { return HEAD + lane * this.laneHeight - this.scroll; }
  lane(y) { return Math.floor((y - HEAD + this.scroll) / this.laneHeight); }
  get lanes() {
    return [
      Math.max(0, Math.floor(this.scroll / this.laneHeight)),
      Math.min(this.track.lanes, Math.ceil((this.scroll + this.plotHeight) / this.laneHeight)),
    ];
  }

  zoom(factor, x) {
    const fixed = this.time(x);
    const whole = (this.track.end - this.track.begin) * 1.04;
    const span = Math.min(whole, Math.max(0.05, (this.end - this.begin) * factor));
    const part = (fixed - this.begin) / (this.end - this.begin);
    this.begin = fixed - part * span;
    this.end = this.begin + span;
    this.keepWithin();
  }

  zoomLanes(factor, y) {
    const fixed = (y - HEAD + this.scroll) / this.laneHeight;
    this.laneHeight = Math.min(MOST_LANE, Math.max(this.fitHeight, this.laneHeight * factor));
    this.scroll = fixed * this.laneHeight - (y - HEAD);
    this.keepWithin();
  }

  pan(dx, dy) {
    const shift = dx / this.scale;
    this.begin -= shift;
    this.end -= shift;
    this.scroll -= dy;
    this.keepWithin();
  }

  span(begin, end) {
    this.begin = begin;
    this.end = Math.max(begin + 0.05, end);
    this.keepWithin();
  }

  reveal(lane) {
    const top = lane * this.laneHeight;
    if (top < this.scroll) this.scroll = top;
    if (top + this.laneHeight > this.scroll + this.plotHeight) this.scroll = top + this.laneHeight - this.plotHeight;
    this.keepWithin();
  }

  keepWithin() {
    const span = this.end - this.begin, margin = span * 0.5;
    const shift = Math.max(this.track.begin - margin - this.begin, 0) + Math.min(this.track.end + margin - this.end, 0);
    this.begin += shift;
    this.end += shift;
    const most = Math.max(0, this.track.lanes * this.laneHeight - this.plotHeight);
    this.scroll = Math.min(most, Math.max(0, this.scroll));
  }
}
