// Elements and the words of numbers. Text is always set as text: names of a model are never read as HTML.

function el(tag, given = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(given)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") node.className = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [name, text] of Object.entries(value)) node.style.setProperty(name, text);
    else node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}

function svg(tag, given = {}) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(given)) node.setAttribute(key, value);
  return node;
}

const grouped = new Intl.NumberFormat("en-US");
const whole = (number) => grouped.format(number);
const counted = (number, one, many = one + "s") => `${whole(number)} ${number === 1 ? one : many}`;

// Microseconds, with three digits that count.
function micros(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const us = seconds * 1e6;
  return us >= 100 ? grouped.format(Math.round(us)) : us >= 10 ? us.toFixed(1) : us.toFixed(2);
}
const time = (seconds) => (seconds === null || seconds === undefined ? "–" : `${micros(seconds)} µs`);

function bytes(count) {
  if (count === null || count === undefined) return "–";
  for (const [unit, size] of [
    ["GB", 1e9],
    ["MB", 1e6],
    ["kB", 1e3],
  ]) {
    if (count >= size) return `${(count / size).toFixed(count / size >= 100 ? 0 : count / size >= 10 ? 1 : 2)} ${unit}`;
  }
  return `${count} B`;
}

const percent = (part, all) => (all ? `${((100 * part) / all).toFixed(part / all >= 0.1 ? 0 : 1)} %` : "–");

// The end of a long name, which tells it from others, as `explain` shows it.
const tail = (name, most) => (name.length <= most ? name : "…" + name.slice(1 - most));

function meter(parts, all) {
  const bar = el("span", { class: "meter", "aria-hidden": "true" });
  for (const [part, color] of parts) {
    if (part > 0 && all > 0) bar.append(el("i", { style: { width: `${(100 * part) / all}%`, background: color } }));
  }
  return bar;
}

const BOUNDS = {
  memory: ["device memory", "--memory"],
  l2: ["L2 cache", "--l2"],
  l2_port: ["a multiprocessor's port to the L2 cache", "--l2"],
  chain: ["latencies of one tile", "--chain"],
  tensor: ["tensor cores", "--tensor"],
  fp32: ["fp32 units", "--fp32"],
  shared: ["shared memory", "--unit"],
  issue: ["instructions issued", "--unit"],
  int32: ["integer units", "--unit"],
  special: ["special functions", "--unit"],
};
const boundName = (bound) => (BOUNDS[bound] ? BOUNDS[bound][0] : bound);
const boundColor = (bound) => `var(${BOUNDS[bound] ? BOUNDS[bound][1] : "--unit"})`;
const SCOPES = { grid: "grid barrier", flags: "flags", block: "block barrier" };
const PLACES = { global: "global memory", shared: "shared memory", local: "registers" };
