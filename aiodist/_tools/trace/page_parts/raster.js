// Waiting, where there is too much of it to draw one by one: how much of each pixel was waited.
//
// Every wait adds four numbers, whatever its length: the sum along a row, from the left, is then the part of each
// column that it covers. So a frame costs as much as there are waits and pixels, and not their product.

class Raster {
  constructor() {
    this.canvas = document.createElement("canvas");
    this.covered = new Float32Array(0);
  }

  /** Draw the waits of the collectives from place k0 to k1 of a track's order, in the view's lanes. */
  draw(context, trace, view, [k0, k1], color) {
    const [lane0, lane1] = view.lanes;
    const columns = Math.ceil(view.plotWidth), lanes = lane1 - lane0;
    const rows = Math.max(1, Math.min(lanes, Math.ceil(view.plotHeight)));
    if (!columns || lanes <= 0) return;
    this.add(trace, view, k0, k1, lane0, lane1, columns, rows);
    this.paint(columns, rows, rows / lanes, color);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.canvas, 0, 0, columns, rows, GUTTER, view.y(lane0), columns, lanes * view.laneHeight);
  }

  add(trace, view, k0, k1, lane0, lane1, columns, rows) {
    const width = columns + 2; // what ends beyond the edge has two numbers there
    if (this.covered.length < width * rows) this.covered = new Float32Array(width * rows);
    const covered = this.covered.fill(0, 0, width * rows);
    const { order } = view.track, { offset, lane: lanes, awaited, wait, first } = trace;
    const scale = view.scale, perLane = rows / (lane1 - lane0);
    for (let k = k0; k < k1; k += 1) {
      const i = order[k], base = (first[i] - view.begin) * scale;
      for (let j = offset[i]; j < offset[i + 1]; j += 1) {
        const lane = lanes[j];
        if (lane < lane0 || lane >= lane1 || !(wait[j] > 0)) continue;
        const from = Math.max(0, base + awaited[j] * scale);
        const to = Math.min(columns, base + (awaited[j] + wait[j]) * scale);
        if (!(to > from)) continue;
        const row = Math.floor((lane - lane0) * perLane) * width;
        const a = Math.floor(from), b = Math.floor(to), inA = from - a, inB = to - b;
        covered[row + a] += 1 - inA;
        covered[row + a + 1] += inA;
        covered[row + b] -= 1 - inB;
        covered[row + b + 1] -= inB;
      }
    }
  }

  paint(columns, rows, perLane, [red, green, blue]) {
    if (this.canvas.width !== columns || this.canvas.height !== rows) {
      this.canvas.width = columns;
      this.canvas.height = rows;
    }
    const context = this.canvas.getContext("2d");
    const image = context.createImageData(columns, rows);
    const pixels = new Uint32Array(image.data.buffer), opaque = (blue << 16) | (green << 8) | red;
    for (let row = 0; row < rows; row += 1) {
      let sum = 0;
      for (let column = 0, at = row * (columns + 2), to = row * columns; column < columns; column += 1) {
        sum += this.covered[at + column];
        const part = sum * perLane;
        if (part > 0.002) pixels[to + column] = (Math.min(255, 24 + part * 231) << 24) | opaque;
      }
    }
    context.putImageData(image, 0, 0);
  }
}
