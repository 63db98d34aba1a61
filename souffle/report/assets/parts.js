// What the panel is made of: links, lists and facts, and the words for what stands between two stages.

// A long name, which may go on in the next line behind each underscore.
const breakable = (name) => name.split(/(?<=_)/).flatMap((part, at) => (at ? [el("wbr"), part] : [part]));

const go = (kind, number, words, mono = true) =>
  el(
    "button",
    { class: `link${mono ? " mono" : ""}`, type: "button", onclick: () => choose(kind, number) },
    breakable(words),
  );
const toStage = (number) => go("stage", number, stages[number].name);
const facts = (pairs) =>
  el(
    "dl",
    { class: "facts" },
    pairs
      .filter((pair) => pair && pair[1] !== null && pair[1] !== undefined)
      .flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]),
  );
const listed = (items) =>
  el(
    "ul",
    {},
    items.map((item) => el("li", {}, item)),
  );
const code = (text) => el("pre", { tabindex: "0" }, text);

// A part that is made when it is opened.
function folded(title, make, open = false) {
  const node = el(
    "details",
    {
      open,
      ontoggle: () => {
        if (node.open && node.children.length === 1) node.append(make());
      },
    },
    el("summary", {}, title),
  );
  if (open) node.append(make());
  return node;
}

// At most so many of a list, and a button for the rest.
function some(items, draw, most = 12) {
  const list = el(
    "ul",
    {},
    items.slice(0, most).map((item) => el("li", {}, draw(item))),
  );
  if (items.length <= most) return list;
  const more = el(
    "button",
    {
      class: "link",
      type: "button",
      onclick: () => {
        list.append(...items.slice(most).map((item) => el("li", {}, draw(item))));
        more.remove();
      },
    },
    `${whole(items.length - most)} more`,
  );
  return el("div", {}, list, more);
}

function decisionItem(number) {
  const [stage, subject, accepted, reason] = decisions[number];
  return el(
    "div",
    {},
    el("span", { class: `tag ${accepted ? "yes" : "no"}` }, `${stage}: ${accepted ? "done" : "refused"}`),
    el("button", { class: "link mono", type: "button", onclick: () => choose("decision", number) }, breakable(subject)),
    el("div", { class: "muted" }, reason),
  );
}

// How a stage that makes a tensor and one that reads it are kept in order, with the reason.
function relation(maker, reader) {
  const found = between(maker, reader);
  const both = aboutBoth(maker, reader);
  if (found.apart) {
    const about = report.merges ? aboutKernels(maker, reader) : [];
    const why = report.merges
      ? "They are in different kernels: the next one begins when the last one has ended."
      : `They are in different kernels: at ${report.shown} each stage is a kernel of its own, and from V3 on a kernel may have several.`;
    return el(
      "div",
      { class: "why apart" },
      el("div", {}, why),
      [...new Set([...about, ...both])].slice(0, 6).map(decisionItem),
    );
  }
  const reasons = both.filter((number) => !decisions[number][2]).slice(0, 4);
  const notOne = reasons.length
    ? folded("why they are not one stage", () => el("div", {}, reasons.map(decisionItem)))
    : null;
  if (!found.wait) return el("div", { class: "why" }, "Same kernel, and no wait stands between them.", notOne);
  const { wait, asked } = found;
  return el(
    "div",
    { class: `why ${wait.scope}` },
    el(
      "div",
      {},
      "Same kernel; ",
      go("wait", wait.number, SCOPES[wait.scope], false),
      wait.runs > 1 ? ` × ${whole(wait.runs)}` : "",
      asked
        ? ` between them, for this: ${wait.reason}.`
        : ` between them, which ${stages[wait.before].name} demands: ${wait.reason}.`,
    ),
    notOne,
  );
}

// The dependence in words: a stage reads what another made, or overwrites what another still reads.
function demanded(wait) {
  const of = (stage, written) =>
    stages[stage].touched.some((one) => one.tensor === wait.tensor && one.written === written);
  const tensor =
    wait.tensor === null
      ? el("span", { class: "mono" }, wait.tensor_name)
      : go("tensor", wait.tensor, wait.tensor_name);
  if (wait.place === "loop" || (!of(wait.before, false) && !of(wait.before, true)))
    return [toStage(wait.before), " and ", toStage(wait.after), " depend on each other by ", tensor, "."];
  if (of(wait.before, false))
    return [toStage(wait.before), " reads ", tensor, ", which ", toStage(wait.after), " makes."];
  return [toStage(wait.before), " overwrites ", tensor, ", which ", toStage(wait.after), " has to have read."];
}

const against = (value, most, words) =>
  value === null || value === undefined
    ? null
    : el("div", {}, words, meter([[value, value > most ? "var(--no)" : "var(--accent)"]], most));
