// The panel: all that is known of what is selected, and the ways from it to what it has to do with.

const panel = document.getElementById("detail");

// A long name, which may go on in the next line behind each underscore.
const breakable = (name) => name.split(/(?<=_)/).flatMap((part, at) => (at ? [el("wbr"), part] : [part]));

const go = (kind, number, words, mono = true) => el("button", { class: `link${mono ? " mono" : ""}`, type: "button", onclick: () => choose(kind, number) }, breakable(words));
const toStage = (number) => go("stage", number, stages[number].name);
const facts = (pairs) => el("dl", { class: "facts" }, pairs.filter((pair) => pair && pair[1] !== null && pair[1] !== undefined).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
const listed = (items) => el("ul", {}, items.map((item) => el("li", {}, item)));
const code = (text) => el("pre", { tabindex: "0" }, text);

// A part that is made when it is opened.
function folded(title, make, open = false) {
  const node = el("details", { open, ontoggle: () => { if (node.open && node.children.length === 1) node.append(make()); } }, el("summary", {}, title));
  if (open) node.append(make());
  return node;
}

// At most so many of a list, and a button for the rest.
function some(items, draw, most = 12) {
  const list = el("ul", {}, items.slice(0, most).map((item) => el("li", {}, draw(item))));
  if (items.length <= most) return list;
  const more = el("button", { class: "link", type: "button", onclick: () => { list.append(...items.slice(most).map((item) => el("li", {}, draw(item)))); more.remove(); } }, `${whole(items.length - most)} more`);
  return el("div", {}, list, more);
}

function decisionItem(number) {
  const [stage, subject, accepted, reason] = decisions[number];
  return el("div", {}, el("span", { class: `tag ${accepted ? "yes" : "no"}` }, `${stage}: ${accepted ? "done" : "refused"}`), el("button", { class: "link mono", type: "button", onclick: () => choose("decision", number) }, breakable(subject)), el("div", { class: "muted" }, reason));
}

// How a stage that makes a tensor and one that reads it are kept in order, with the reason.
function relation(maker, reader) {
  const found = between(maker, reader);
  const both = aboutBoth(maker, reader);
  if (found.apart) {
    const about = report.merges ? aboutKernels(maker, reader) : [];
    const why = report.merges ? "They are in different kernels: the next one begins when the last one has ended." : `They are in different kernels: at ${report.shown} each stage is a kernel of its own, and from V3 on a kernel may have several.`;
    return el("div", { class: "why apart" }, el("div", {}, why), [...new Set([...about, ...both])].slice(0, 6).map(decisionItem));
  }
  const reasons = both.filter((number) => !decisions[number][2]).slice(0, 4);
  const notOne = reasons.length ? folded("why they are not one stage", () => el("div", {}, reasons.map(decisionItem))) : null;
  if (!found.wait) return el("div", { class: "why" }, "Same kernel, and no wait stands between them.", notOne);
  const { wait, asked } = found;
  return el("div", { class: `why ${wait.scope}` }, el("div", {}, "Same kernel; ", go("wait", wait.number, SCOPES[wait.scope], false), wait.runs > 1 ? ` × ${whole(wait.runs)}` : "", asked ? ` between them, for this: ${wait.reason}.` : ` between them, which ${stages[wait.before].name} demands: ${wait.reason}.`), notOne);
}

// The dependence in words: a stage reads what another made, or overwrites what another still reads.
function demanded(wait) {
  const of = (stage, written) => stages[stage].touched.some((one) => one.tensor === wait.tensor && one.written === written);
  const tensor = wait.tensor === null ? el("span", { class: "mono" }, wait.tensor_name) : go("tensor", wait.tensor, wait.tensor_name);
  if (wait.place === "loop" || (!of(wait.before, false) && !of(wait.before, true))) return [toStage(wait.before), " and ", toStage(wait.after), " depend on each other by ", tensor, "."];
  if (of(wait.before, false)) return [toStage(wait.before), " reads ", tensor, ", which ", toStage(wait.after), " makes."];
  return [toStage(wait.before), " overwrites ", tensor, ", which ", toStage(wait.after), " has to have read."];
}

const against = (value, most, words) => (value === null || value === undefined ? null : el("div", {}, words, meter([[value, value > most ? "var(--no)" : "var(--accent)"]], most)));

const draws = {
  stage(number) {
    const stage = stages[number];
    const launch = launchOf(number);
    const kernel = kernelOf(number);
    const { device } = report;
    const touch = (one) => el("div", {}, el("span", { class: "tag" }, one.written ? "writes" : "reads"), go("tensor", one.tensor, tensors[one.tensor].name),
      el("span", { class: "muted" }, one.where === "global" ? `  ${bytes(one.bytes)}` : `  in ${PLACES[one.where]}${one.bytes ? `, ${bytes(one.bytes)} read once` : ""}`));
    const before = new Set(stage.needs_before);
    const inside = stage.tes.flatMap((te) => report.tes[te]?.inside ?? []);
    const own = waitsOfLaunch[launch.like].filter((wait) => waits[wait].at === likeStage(number));
    return [el("div", { class: "sort" }, `Stage ${position[number] + 1} of ${launch.stages.length}, `, go("launch", stage.launch, `kernel ${launch.kernel + 1}`, false), launches.length > 1 ? `, launch ${stage.launch + 1}` : ""),
      el("h2", { class: "mono" }, breakable(stage.name)),
      facts([["predicted", stage.seconds === null ? null : `${time(stage.seconds)}${stage.runs > 1 ? ` in ${whole(stage.runs)} runs` : ""}, ${percent(stage.seconds, kernel.seconds)} of its kernel`],
        ["bound by", stage.bound && boundName(stage.bound)], ["tiles", `${whole(stage.tiles)} of ${whole(stage.threads)} threads`],
        ["loop", stage.loop === null ? null : go("loop", stage.loop, `${whole(loops[stage.loop].steps)} steps`, false)],
        ["moves", `${bytes(stageBytes[number])} of global memory`],
        ["registers", against(stage.registers, device.registers_of_thread, `${stage.registers} of ${device.registers_of_thread}, alone`)],
        ["shared memory", against(stage.shared_bytes, device.shared_bytes_of_block, `${bytes(stage.shared_bytes)} of ${bytes(device.shared_bytes_of_block)}, alone`)],
        ["stack", stage.stack_bytes ? `${bytes(stage.stack_bytes)} of a thread` : null]]),
      own.length ? [el("h3", {}, "Waits before it"), listed(own.map((wait) => el("div", { class: `why ${waits[wait].scope}` }, go("wait", wait, SCOPES[waits[wait].scope], false), waits[wait].runs > 1 ? ` × ${whole(waits[wait].runs)}` : "", `: ${waits[wait].reason}`)))] : null,
      stage.needs.length || before.size ? [el("h3", {}, "Needs, and what stands between"), some([...new Set([...stage.needs, ...before])], (maker) => [toStage(maker), before.has(maker) && !stage.needs.includes(maker) ? el("span", { class: "muted" }, " of an earlier step") : "", relation(maker, number)])] : null,
      readers[number].length ? [el("h3", {}, "Is read by"), some(readers[number], (reader) => [toStage(reader), relation(number, reader)], 6)] : null,
      el("h3", {}, "Tensors"), some(stage.touched, touch, 16),
      inside.length ? [el("h3", {}, "Stay inside"), el("p", { class: "muted" }, "Made and read within a tile, never in global memory."), some(inside, ([name, size]) => [el("span", { class: "mono" }, name), el("span", { class: "muted" }, `  ${bytes(size)}`)], 6)] : null,
      el("h3", {}, `Computes ${counted(stage.tes.length, "TE")}`),
      el("div", {}, stage.tes.map((te) => (report.tes[te] ? folded(te, () => el("div", {}, code(report.tes[te].text), el("p", { class: "muted" }, `of ${report.tes[te].origin}`)), stage.tes.length === 1) : el("div", { class: "mono" }, te)))),
      Object.keys(report.tes).length ? null : el("p", { class: "muted" }, "The text of TEs is not kept in saved files; make the report of the model to see it."),
      el("h3", {}, "CUDA text"), stage.functions.map((name) => folded(name, () => code(functionText(kernel.module, name) ?? "Its text is not in the module."))),
      stage.decisions.length ? [el("h3", {}, counted(stage.decisions.length, "decision")), folded("about it and its TEs", () => some(stage.decisions, decisionItem, 30))] : null];
  },

  launch(number) {
    const launch = launches[number];
    const kernel = kernels[launch.kernel];
    const { device } = report;
    const own = waitsOfLaunch[launch.like];
    const section = report.certificate?.kernels.find((one) => one.name === kernel.name);
    const [resource, room] = tightest(kernel);
    const stageSeconds = kernel.seconds === null ? null : kernel.seconds - kernel.launch_seconds - kernel.wait_seconds - kernel.code_seconds;
    const about = [...new Set(launch.stages.flatMap((stage) => stages[stage].decisions))].filter((one) => ["partition", "choice"].includes(decisions[one][0]) || decisions[one][1].includes(kernel.name));
    const whole_network = decisions.map((_, one) => one).filter((one) => decisions[one][0] === "partition" && !about.includes(one) && launches.length === 1);
    return [el("div", { class: "sort" }, `Kernel ${launch.kernel + 1} of ${kernels.length}${kernel.launches.length > 1 ? `, launched ${counted(kernel.launches.length, "time")}` : ""}`),
      el("h2", { class: "mono" }, breakable(kernel.name)),
      launch.like !== number ? el("p", { class: "muted" }, "The same kernel as in ", go("launch", launch.like, `launch ${launch.like + 1}`, false), ", with other tensors; its waits are told of that one.") : null,
      facts([["predicted", kernel.seconds === null ? null : `${time(kernel.seconds)} a launch: stages ${time(stageSeconds)}, waits ${time(kernel.wait_seconds)}, launch ${time(kernel.launch_seconds)}${kernel.code_seconds ? `, fetched code ${time(kernel.code_seconds)}` : ""}`],
        ["stages", whole(launch.stages.length)], ["tiles", `${whole(kernel.tiles)}${kernel.teams > 1 ? `; a block is ${kernel.teams} teams, each of which computes tiles as a block would` : ""}`],
        ["grid barriers", `${whole(kernel.grid_syncs)} in a launch${kernel.arrivals ? `, and ${counted(kernel.arrivals, "arrival")} at flags` : ""}`],
        ["moves", `${bytes(launch.bytes_read)} read, ${bytes(launch.bytes_written)} written`],
        ["registers", kernel.registers === null ? "nvcc was not run" : against(kernel.registers, device.registers_of_thread, `${kernel.registers} of ${device.registers_of_thread} of a thread`)],
        ["shared memory", against(kernel.shared_bytes, device.shared_bytes_of_block, `${bytes(kernel.shared_bytes)} of ${bytes(device.shared_bytes_of_block)} of a block`)],
        ["threads", against(kernel.threads, device.threads_of_block, `${whole(kernel.threads)} of ${whole(device.threads_of_block)} of a block`)],
        ["spilled", kernel.spill_bytes ? bytes(kernel.spill_bytes) : null], ["stack", kernel.stack_bytes ? `${bytes(kernel.stack_bytes)} of a thread` : null], ["machine code", kernel.code_bytes ? bytes(kernel.code_bytes) : null],
        ["resident blocks", room === null ? kernel.blocks_per_sm : `${room} on a multiprocessor, as many as its ${resource} have room for (${Object.entries(kernel.room).map(([name, count]) => `${name} ${count}`).join(", ")})`],
        ["grid", kernel.most_blocks === null ? null : `at most ${counted(kernel.most_blocks, "block")}: barriers of more take longer than stages get shorter`]]),
      own.length ? [el("h3", {}, `Waits at ${counted(own.length, "place")}`), some(own, (wait) => el("div", { class: `why ${waits[wait].scope}` }, go("wait", wait, `${SCOPES[waits[wait].scope]}${waits[wait].runs > 1 ? ` × ${whole(waits[wait].runs)}` : ""}`, false), " before ", toStage(waits[wait].before), el("div", { class: "muted" }, waits[wait].reason)))] : null,
      about.length + whole_network.length ? [el("h3", {}, "Why it is a kernel"), some([...whole_network, ...about], decisionItem, 8)] : null,
      section ? [el("h3", {}, "Certificate"), el("p", {}, el("b", { class: section.verdict === "PROVEN" ? "yes" : "no" }, section.verdict), `: ${section.facts.map(([what, count]) => `${whole(count)} ${what}`).join(", ")}`)] : null,
      el("h3", {}, "Stages"), some(launch.stages, toStage, 40),
      el("h3", {}, "CUDA text"), folded(kernel.name, () => code(functionText(kernel.module, kernel.name) ?? "Its text is not in the module."))];
  },

  loop(number) {
    const loop = loops[number];
    const own = waits.map((wait, at) => at).filter((at) => stages[waits[at].at].loop === number && waits[at].place !== "loop");
    const seconds = loop.stages.reduce((sum, stage) => sum + (stages[stage].seconds ?? 0), 0);
    return [el("div", { class: "sort" }, "Loop in ", go("launch", loop.launch, `kernel ${launches[loop.launch].kernel + 1}`, false)), el("h2", { class: "mono" }, breakable(loop.name)),
      el("p", { class: "muted" }, `Repeated layers or steps: one body, run ${whole(loop.steps)} times.`),
      facts([["steps", whole(loop.steps)], ["stages", whole(loop.stages.length)], ["predicted", seconds ? `${time(seconds)} in all its steps, ${time(seconds / loop.steps)} each` : null], ["waits", own.length ? counted(own.reduce((sum, at) => sum + waits[at].runs, 0), "run") : null]]),
      el("h3", {}, "Stages"), some(loop.stages, toStage, 40)];
  },

  wait(number) {
    const wait = waits[number];
    const where = { before: "before a stage", loop: "before a loop", steps: "between the steps of a loop" }[wait.place];
    const what = { grid: "All blocks of the kernel wait for each other.", flags: "Each tile waits for the blocks whose tiles it needs, and for no others.", block: "The threads of a block wait for each other." }[wait.scope];
    const [tiles, others] = [stages[wait.before].tiles, stages[wait.after].tiles];
    const why = {
      grid: `Its ${counted(tiles, "tile")} need what ${counted(others, "tile")} of the other stage wrote, and not only those that its own block computed. So all blocks have to be done with the one before any begins the other.`,
      flags: `Its ${counted(tiles, "tile")} need what some of ${counted(others, "tile")} of the other stage wrote, by known blocks: each waits for these alone.`,
      block: "What its tiles need stays on the block that made it, whatever the grid; so its own threads are all that have to be done.",
    }[wait.scope];
    return [el("div", { class: "sort" }, "Wait in ", go("launch", wait.launch, `kernel ${launches[wait.launch].kernel + 1}`, false), `, ${where}`), el("h2", {}, (SCOPES[wait.scope] ?? wait.scope).replace(/^./, (c) => c.toUpperCase())),
      el("p", { class: "muted" }, what),
      facts([["before", toStage(wait.before)], ["after", toStage(wait.after)], ["for the tensor", wait.tensor === null ? el("span", { class: "mono" }, wait.tensor_name) : go("tensor", wait.tensor, wait.tensor_name)], ["because", `${wait.reason}`],
        ["runs", `${whole(wait.runs)} in a launch`], ["predicted", wait.scope === "block" || wait.seconds === null ? null : `${time(wait.seconds)} in all: its part of the launch's waits, shared out evenly`]]),
      el("h3", {}, "What demands it"), el("p", {}, ...demanded(wait), " ", why ?? ""),
      wait.place === "steps" ? el("p", { class: "muted" }, "It stands between two steps of the loop: the next step needs what this one made, or overwrites what this one reads.") : null,
      wait.place === "loop" ? el("p", { class: "muted" }, "It stands before the loop's first step; what it names is the loop as a whole.") : null];
  },

  tensor(number) {
    const tensor = tensors[number];
    const all = tensors.reduce((sum, one) => sum + one.read + one.written, 0);
    const near = stages.map((_, stage) => stage).filter((stage) => stages[stage].touched.some((one) => one.tensor === number && one.where !== "global"));
    const rank = 1 + tensors.filter((one) => one.read + one.written > tensor.read + tensor.written).length;
    return [el("div", { class: "sort" }, `Tensor, ${tensorKind(tensor)}`), el("h2", { class: "mono" }, breakable(tensor.name)),
      facts([["in the model", tensor.label !== tensor.name ? tensor.label : null], ["shape", tensor.shape && `${tensor.dtype}[${tensor.shape.join(", ")}]`], ["size", bytes(tensor.bytes)],
        ["moved", `${bytes(tensor.read + tensor.written)} of global memory in one run: ${bytes(tensor.read)} read, ${bytes(tensor.written)} written`], ["of all", tensor.read + tensor.written ? `${percent(tensor.read + tensor.written, all)}, rank ${rank} of ${tensors.length}` : null]]),
      near.length ? [el("h3", {}, "Found on chip by"), some(near, (stage) => [toStage(stage), el("span", { class: "muted" }, `  in ${PLACES[stages[stage].touched.find((one) => one.tensor === number && one.where !== "global").where]}`)])] : null,
      tensor.makers.length ? [el("h3", {}, "Made by"), some(tensor.makers, toStage)] : null,
      tensor.readers.length ? [el("h3", {}, "Read by"), some(tensor.readers, (stage) => [toStage(stage), el("span", { class: "muted" }, `  ${bytes(stages[stage].touched.filter((one) => one.tensor === number && !one.written).reduce((sum, one) => sum + one.bytes, 0))}`)])] : null,
      ((about) => (about.length ? [el("h3", {}, "Decisions on where it is"), some(about, decisionItem, 6)] : null))(decisions.map((_, at) => at).filter((at) => decisions[at][0] === "resident" && decisions[at][1].split(/[ ,]+/)[0] === tensor.name))];
  },

  decision(number) {
    const [stage, subject, accepted, reason] = decisions[number];
    const named = stages.map((_, at) => at).filter((at) => stages[at].decisions.includes(number));
    return [el("div", { class: "sort" }, `Decision of ${stage}`), el("h2", { class: "mono" }, breakable(subject)), el("p", {}, el("span", { class: `tag ${accepted ? "yes" : "no"}` }, accepted ? "done" : "refused")), el("p", {}, reason),
      named.length ? [el("h3", {}, "Stages that it speaks of"), some(named, toStage)] : null];
  },

  nothing() {
    return [el("h2", {}, "Select anything"), el("p", { class: "muted" }, "A kernel, a stage, a wait, a tensor or a decision: what is known of it stands here, with its TEs and its CUDA text."),
      facts([["model", el("span", { class: "mono" }, report.name)], ["level", `${report.shown}: ${shown.summary}`], ["precision", report.options.precision], ["fusion", report.options.fusion], ["partition", report.options.partition], ["waits", report.options.waits],
        ["left out", report.options.disable.length ? report.options.disable.join(", ") : null], ["GPU", `${report.device.arch}${report.device.predicted_on ? `, times of ${report.device.predicted_on}` : ""}`], ["constants", bytes(shown.constant_bytes)], ["workspace", bytes(shown.workspace_bytes)], ["made by", `Souffle ${report.souffle}`]]),
      el("h3", {}, "Questions"), el("ul", {}, [["Why are two stages in different kernels, or why is there a wait?", "Select the one that reads: below Needs stands what is between.", "program"], ["Which tensor costs most bytes?", "Tensors are in that order.", "tensors"], ["Why was something not done?", "Decisions that were refused say so.", "decisions"]].map(([question, answer, tab]) => el("li", {}, go_tab(tab, question), el("div", { class: "muted" }, answer)))),
      el("h3", {}, "Keys"), facts([["/", "search this part"], ["1 … 7", "the parts"], ["arrows", "through lists; left and right close and open kernels"], ["enter", "into the panel"], ["esc", "out of the search or the panel"]].map(([key, words]) => [el("kbd", {}, key), words]))];
  },
};

const go_tab = (tab, words) => el("button", { class: "link", type: "button", onclick: () => showTab(tab) }, words);

function drawDetail() {
  const made = selected.kind ? draws[selected.kind](selected.number) : draws.nothing();
  panel.replaceChildren(...made.flat(3).filter(Boolean));
  panel.scrollTop = 0;
}
