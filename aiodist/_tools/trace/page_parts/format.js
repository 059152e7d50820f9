// Numbers as a person reads them.

function threeDigits(value) {
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/** Return a time, given in microseconds. */
function formatTime(micros) {
  const size = Math.abs(micros);
  if (size === 0) return "0";
  if (size >= 999500) return `${threeDigits(micros / 1e6)} s`;
  if (size >= 999.5) return `${threeDigits(micros / 1e3)} ms`;
  if (size >= 0.9995) return `${threeDigits(micros)} µs`;
  return `${(micros * 1e3).toFixed(0)} ns`;
}

/** Return a point of time for an axis whose marks are `step` microseconds apart. */
function formatTick(micros, step) {
  const [unit, scale] = step >= 1e6 || micros >= 1e6 ? ["s", 1e6] : step >= 1e3 || micros >= 1e4 && step >= 10 ? ["ms", 1e3] : ["µs", 1];
  const digits = Math.max(0, Math.ceil(-Math.log10(step / scale) - 1e-9));
  return `${(micros / scale).toFixed(digits)} ${unit}`;
}

function formatBytes(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; bytes >= 1024 && unit < units.length - 1; unit += 1) bytes /= 1024;
  return unit ? `${threeDigits(bytes)} ${units[unit]}` : `${bytes} B`;
}

function formatCount(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

/** Return ids as text: "replica 2", "replicas 0-5, 7 and 9". */
function formatReplicas(ids) {
  const runs = [];
  for (const id of [...ids].sort((a, b) => a - b)) {
    const last = runs[runs.length - 1];
    if (last && last[1] === id - 1) last[1] = id;
    else runs.push([id, id]);
  }
  const parts = runs.slice(0, 6).map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`));
  if (runs.length > 6) parts.push("…");
  const text = parts.length > 1 ? `${parts.slice(0, -1).join(", ")} and ${parts[parts.length - 1]}` : parts[0];
  return `${ids.length === 1 ? "replica" : "replicas"} ${text}`;
}
