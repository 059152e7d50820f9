// The trace as columns of numbers, one item for each collective or arrival.

function readTrace(raw) {
  const { collectives } = raw, arrivals = collectives.flatMap((one) => one.arrivals);
  const of = (Type, field) => Type.from(collectives, field), each = (Type, at) => Type.from(arrivals, (row) => row[at]);
  const offset = new Uint32Array(collectives.length + 1);
  collectives.forEach((one, i) => (offset[i + 1] = offset[i] + one.arrivals.length));
  const trace = {
    name: raw.name, about: raw.about, texts: raw.texts, statistics: raw.statistics, runs: raw.runs.map(readRun), offset,
    first: of(Float64Array, (one) => one.first * 1e6), completed: of(Float64Array, (one) => one.first * 1e6 + one.completed),
    end: of(Float64Array, (one) => one.first * 1e6 + one.arrivals.reduce((end, row) => Math.max(end, row[5]), one.completed)),
    run: of(Uint32Array, (one) => one.run), number: of(Uint32Array, (one) => one.number),
    last: of(Uint32Array, (one) => one.last), status: of(Uint8Array, (one) => one.status),
    bytes: of(Float64Array, (one) => one.arrivals.reduce((sum, row) => sum + row[2], 0)),
    group: collectives.map((one) => one.group),
    lane: each(Uint32Array, 0), text: each(Uint32Array, 1), issued: each(Float32Array, 3),
    awaited: each(Float32Array, 4), resumed: each(Float32Array, 5), wait: each(Float32Array, 6),
  };
  trace.kinds = [...new Set(trace.texts.map((text) => text.kind))].sort((a, b) => (a === "barrier" ? -1 : b === "barrier" ? 1 : a < b ? -1 : 1));
  trace.runByNumber = new Map(trace.runs.map((run) => [run.number, run]));
  trace.tracks = raw.tracks.map((track) => readTrack(trace, track));
  return trace;
}

/** Return a run with its times in microseconds and its replicas by lane: an id counts from `base`, a lane from 0. */
function readRun({ first: base, functions, report, ...run }) {
  const all = Object.entries(functions).map(([id, one]) => [id - base, one]), ended = ([, one]) => (one.ended ?? run.over) * 1e6;
  const suspects = report?.suspects.map((id) => id - base).filter((lane) => lane in all);
  return {
    ...run, base, begin: run.begun * 1e6, end: run.over * 1e6, report: report && { ...report, at: report.at * 1e6, suspects },
    started: all.map(([, one]) => one.started * 1e6), ended: all.map(ended),
    errors: Object.fromEntries(all.filter(([, one]) => one.error).map(([lane, one]) => [lane, one.error])),
  };
}

/** Return a set of lanes: its runs, and its collectives in the order of their first arrivals. */
function readTrack(trace, { pid, base, devices }) {
  const runs = trace.runs.filter((run) => run.pid === pid);
  const numbers = new Set(runs.map((run) => run.number));
  const ids = [];
  for (let i = 0; i < trace.first.length; i += 1) if (numbers.has(trace.run[i])) ids.push(i);
  const order = Uint32Array.from(ids);
  const first = new Float64Array(order.length), latestEnd = new Float64Array(order.length);
  let latest = -Infinity;
  for (let k = 0; k < order.length; k += 1) {
    first[k] = trace.first[order[k]];
    latest = Math.max(latest, trace.end[order[k]]);
    latestEnd[k] = latest; // never falls, so that what may reach into a stretch of time is found by halving
  }
  const begin = Math.min(...runs.map((run) => run.begin)), end = Math.max(...runs.map((run) => run.end));
  return { pid, base, devices, runs, order, first, latestEnd, begin, end: Math.max(end, begin + 1), lanes: devices.length };
}

/** Return the first index at which a rising column is at least (or, strictly, more than) a value. */
function lowerBound(column, value, strictly = false) {
  let low = 0, high = column.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (strictly ? column[middle] > value : column[middle] >= value) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** Return which of a track's collectives, by their place in its order, may be seen between two moments. */
function collectivesBetween(track, begin, end) {
  return [lowerBound(track.latestEnd, begin), lowerBound(track.first, end, true)];
}

/** Return the arrival of a lane's replica at a collective; -1 if it has none. */
function arrivalOf(trace, collective, lane) {
  const begin = trace.offset[collective], end = trace.offset[collective + 1];
  if (begin + lane < end && trace.lane[begin + lane] === lane) return begin + lane;
  for (let i = begin; i < end; i += 1) if (trace.lane[i] === lane) return i;
  return -1;
}

/** Return the id of the replica that a lane of a collective's run has: where there are several workers, it counts over all. */
function replicaOf(trace, collective, lane) {
  return trace.runByNumber.get(trace.run[collective]).base + lane;
}
