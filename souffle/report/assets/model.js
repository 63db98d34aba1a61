// The report's data, and what follows from it: who reads whom, what stands between two stages, what a search finds.

const report = JSON.parse(document.getElementById("report-data").textContent);
const { stages, launches, kernels, loops, waits, tensors, decisions } = report;
let texts = null;
const moduleText = (number) => (texts ??= JSON.parse(document.getElementById("report-texts").textContent))[number];

const shown = report.levels.find((level) => level.level === report.shown);
const position = stages.map(() => 0);
launches.forEach((launch) => launch.stages.forEach((stage, place) => (position[stage] = place)));
const readers = stages.map(() => []);
stages.forEach((stage, number) => {
  for (const maker of new Set([...stage.needs, ...stage.needs_before]))
    if (maker !== number) readers[maker].push(number);
});
const waitsOfLaunch = launches.map(() => []);
waits.forEach((wait, number) => waitsOfLaunch[wait.launch].push(number));

const launchOf = (stage) => launches[stages[stage].launch];
const kernelOf = (stage) => kernels[launchOf(stage).kernel];
const stageBytes = stages.map((stage) => stage.touched.reduce((sum, one) => sum + one.bytes, 0));
const longest = stages.reduce((most, stage) => Math.max(most, stage.seconds ?? 0), 0);

// A stage of a launch, as the first launch of its kernel has it: waits are known of that.
function likeStage(stage) {
  return launches[launchOf(stage).like].stages[position[stage]];
}

// What stands between a stage and one that reads what it makes.
function between(maker, reader) {
  if (stages[maker].launch !== stages[reader].launch) return { apart: true };
  const [first, second] = [likeStage(maker), likeStage(reader)];
  const own = waitsOfLaunch[launchOf(reader).like].map((number) => ({ number, ...waits[number] }));
  const asked = own.find((wait) => wait.before === second && wait.after === first);
  if (asked) return { wait: asked, asked: true };
  const rank = { grid: 0, flags: 1, block: 2 };
  const turned = position[first] >= position[second];
  const passed = own
    .filter((wait) => {
      const at = position[wait.at];
      const loop = stages[wait.at].loop;
      const inside =
        wait.place !== "steps" ||
        (turned && loop !== null && stages[first].loop === loop && stages[second].loop === loop);
      return (
        inside &&
        (turned
          ? wait.place === "steps" || at > position[first] || at <= position[second]
          : at > position[first] && at <= position[second])
      );
    })
    .sort((a, b) => rank[a.scope] - rank[b.scope]);
  return passed.length ? { wait: passed[0], asked: false } : {};
}

// Decisions about two stages at once; where they are in different kernels, those on kernels that name either as well.
const ABOUT_KERNELS = new Set(["partition", "choice", "fusion"]);
function aboutBoth(one, other) {
  const named = new Set(stages[one].decisions);
  return stages[other].decisions.filter((number) => named.has(number));
}
function aboutKernels(one, other) {
  const named = new Set([
    ...stages[one].decisions,
    ...stages[other].decisions,
    ...launchOf(other)
      .stages.slice(0, 1)
      .flatMap((first) => stages[first].decisions),
  ]);
  return [...named].filter((number) => ABOUT_KERNELS.has(decisions[number][0])).sort((a, b) => a - b);
}

const haystacks = [];
function haystack(stage) {
  const one = stages[stage];
  return (haystacks[stage] ??= [
    one.name,
    ...one.functions,
    ...one.tes,
    ...one.touched.map((t) => tensors[t.tensor].name),
    ...one.tes.map((te) => report.tes[te]?.origin ?? ""),
  ]
    .join("\n")
    .toLowerCase());
}

// The text of a device function or kernel: from the line that defines it to the brace that ends it.
function functionText(module, name) {
  const text = moduleText(module);
  for (let at = text.indexOf(`${name}(`); at >= 0; at = text.indexOf(`${name}(`, at + 1)) {
    if (/\w/.test(text[at - 1] ?? "")) continue;
    const start = text.lastIndexOf("\n", at) + 1;
    const brace = text.indexOf("{", at);
    const semicolon = text.indexOf(";", at);
    if (/^\s/.test(text.slice(start, start + 1)) || brace < 0 || (semicolon >= 0 && semicolon < brace)) continue;
    const end = text.indexOf("\n}", brace);
    return text.slice(start, end < 0 ? text.length : end + 2);
  }
  return null;
}
