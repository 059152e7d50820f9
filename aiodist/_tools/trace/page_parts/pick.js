// What is under the pointer.

const NEAR = 5; // pixels

/** Return the collective, and the arrival, that a point lies on or near; null for none. */
function pick(trace, view, x, y) {
  const lane = view.lane(y), time = view.time(x), near = NEAR / view.scale;
  if (lane < 0 || lane >= view.track.lanes || x < GUTTER || y < HEAD) return null;
  const [k0, k1] = collectivesBetween(view.track, time - near, time + near);
  let best = null, closest = near;
  for (let k = k0; k < k1; k += 1) {
    const i = view.track.order[k], j = arrivalOf(trace, i, lane);
    if (j < 0) {
      const away = Math.abs(trace.completed[i] - time);
      if (away < closest) [best, closest] = [{ collective: i, arrival: -1, lane }, away];
      continue;
    }
    const begin = trace.first[i] + trace.issued[j], end = Math.max(trace.first[i] + trace.resumed[j], begin);
    const away = time < begin ? begin - time : time > end ? time - end : 0;
    if (away < closest || (away === 0 && closest === 0)) [best, closest] = [{ collective: i, arrival: j, lane }, away];
  }
  return best;
}

/** Return who asked for what in a collective: for each call its text and the replicas, most first. */
function partitions(trace, i) {
  const found = new Map();
  for (let j = trace.offset[i]; j < trace.offset[i + 1]; j += 1) {
    const partition = found.get(trace.text[j]) ?? [];
    partition.push(replicaOf(trace, i, trace.lane[j]));
    found.set(trace.text[j], partition);
  }
  return [...found].map(([text, replicas]) => ({ text, ...trace.texts[text], replicas })).sort((a, b) => b.replicas.length - a.replicas.length);
}

function describe(trace, i) {
  const { call } = trace.texts[trace.text[trace.offset[i]]], group = trace.group[i];
  return `${call} #${trace.number[i]}${group ? ` in ${group}` : ""}`;
}

function totalWait(trace, i) {
  let total = 0, longest = 0;
  for (let j = trace.offset[i]; j < trace.offset[i + 1]; j += 1) {
    total += trace.wait[j];
    longest = Math.max(longest, trace.wait[j]);
  }
  return { total, longest };
}
