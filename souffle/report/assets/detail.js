// The panel: all that is known of what is selected, and the ways from it to what it has to do with.

const panel = document.getElementById("detail");

draws.loop = function loop(number) {
  const loop = loops[number];
  const own = waits
    .map((wait, at) => at)
    .filter((at) => stages[waits[at].at].loop === number && waits[at].place !== "loop");
  const seconds = loop.stages.reduce((sum, stage) => sum + (stages[stage].seconds ?? 0), 0);
  return [
    el(
      "div",
      { class: "sort" },
      "Loop in ",
      go("launch", loop.launch, `kernel ${launches[loop.launch].kernel + 1}`, false),
    ),
    el("h2", { class: "mono" }, breakable(loop.name)),
    el("p", { class: "muted" }, `Repeated layers or steps: one body, run ${whole(loop.steps)} times.`),
    facts([
      ["steps", whole(loop.steps)],
      ["stages", whole(loop.stages.length)],
      ["predicted", seconds ? `${time(seconds)} in all its steps, ${time(seconds / loop.steps)} each` : null],
      [
        "waits",
        own.length
          ? counted(
              own.reduce((sum, at) => sum + waits[at].runs, 0),
              "run",
            )
          : null,
      ],
    ]),
    el("h3", {}, "Stages"),
    some(loop.stages, toStage, 40),
  ];
};

draws.wait = function wait(number) {
  const wait = waits[number];
  const where = { before: "before a stage", loop: "before a loop", steps: "between the steps of a loop" }[wait.place];
  const what = {
    grid: "All blocks of the kernel wait for each other.",
    flags: "Each tile waits for the blocks whose tiles it needs, and for no others.",
    block: "The threads of a block wait for each other.",
  }[wait.scope];
  const [tiles, others] = [stages[wait.before].tiles, stages[wait.after].tiles];
  const why = {
    grid: `Its ${counted(tiles, "tile")} need what ${counted(others, "tile")} of the other stage wrote, and not only those that its own block computed. So all blocks have to be done with the one before any begins the other.`,
    flags: `Its ${counted(tiles, "tile")} need what some of ${counted(others, "tile")} of the other stage wrote, by known blocks: each waits for these alone.`,
    block:
      "What its tiles need stays on the block that made it, whatever the grid; so its own threads are all that have to be done.",
  }[wait.scope];
  return [
    el(
      "div",
      { class: "sort" },
      "Wait in ",
      go("launch", wait.launch, `kernel ${launches[wait.launch].kernel + 1}`, false),
      `, ${where}`,
    ),
    el(
      "h2",
      {},
      (SCOPES[wait.scope] ?? wait.scope).replace(/^./, (c) => c.toUpperCase()),
    ),
    el("p", { class: "muted" }, what),
    facts([
      ["before", toStage(wait.before)],
      ["after", toStage(wait.after)],
      [
        "for the tensor",
        wait.tensor === null
          ? el("span", { class: "mono" }, wait.tensor_name)
          : go("tensor", wait.tensor, wait.tensor_name),
      ],
      ["because", `${wait.reason}`],
      ["runs", `${whole(wait.runs)} in a launch`],
      [
        "predicted",
        wait.scope === "block" || wait.seconds === null
          ? null
          : `${time(wait.seconds)} in all: its part of the launch's waits, shared out evenly`,
      ],
    ]),
    el("h3", {}, "What demands it"),
    el("p", {}, ...demanded(wait), " ", why ?? ""),
    wait.place === "steps"
      ? el(
          "p",
          { class: "muted" },
          "It stands between two steps of the loop: the next step needs what this one made, or overwrites what this one reads.",
        )
      : null,
    wait.place === "loop"
      ? el("p", { class: "muted" }, "It stands before the loop's first step; what it names is the loop as a whole.")
      : null,
  ];
};

draws.tensor = function tensor(number) {
  const tensor = tensors[number];
  const all = tensors.reduce((sum, one) => sum + one.read + one.written, 0);
  const near = stages
    .map((_, stage) => stage)
    .filter((stage) => stages[stage].touched.some((one) => one.tensor === number && one.where !== "global"));
  const rank = 1 + tensors.filter((one) => one.read + one.written > tensor.read + tensor.written).length;
  return [
    el("div", { class: "sort" }, `Tensor, ${tensorKind(tensor)}`),
    el("h2", { class: "mono" }, breakable(tensor.name)),
    facts([
      ["in the model", tensor.label !== tensor.name ? tensor.label : null],
      ["shape", tensor.shape && `${tensor.dtype}[${tensor.shape.join(", ")}]`],
      ["size", bytes(tensor.bytes)],
      [
        "moved",
        `${bytes(tensor.read + tensor.written)} of global memory in one run: ${bytes(tensor.read)} read, ${bytes(tensor.written)} written`,
      ],
      [
        "of all",
        tensor.read + tensor.written
          ? `${percent(tensor.read + tensor.written, all)}, rank ${rank} of ${tensors.length}`
          : null,
      ],
    ]),
    near.length
      ? [
          el("h3", {}, "Found on chip by"),
          some(near, (stage) => [
            toStage(stage),
            el(
              "span",
              { class: "muted" },
              `  in ${PLACES[stages[stage].touched.find((one) => one.tensor === number && one.where !== "global").where]}`,
            ),
          ]),
        ]
      : null,
    tensor.makers.length ? [el("h3", {}, "Made by"), some(tensor.makers, toStage)] : null,
    tensor.readers.length
      ? [
          el("h3", {}, "Read by"),
          some(tensor.readers, (stage) => [
            toStage(stage),
            el(
              "span",
              { class: "muted" },
              `  ${bytes(stages[stage].touched.filter((one) => one.tensor === number && !one.written).reduce((sum, one) => sum + one.bytes, 0))}`,
            ),
          ]),
        ]
      : null,
    ((about) => (about.length ? [el("h3", {}, "Decisions on where it is"), some(about, decisionItem, 6)] : null))(
      decisions
        .map((_, at) => at)
        .filter((at) => decisions[at][0] === "resident" && decisions[at][1].split(/[ ,]+/)[0] === tensor.name),
    ),
  ];
};

draws.decision = function decision(number) {
  const [stage, subject, accepted, reason] = decisions[number];
  const named = stages.map((_, at) => at).filter((at) => stages[at].decisions.includes(number));
  return [
    el("div", { class: "sort" }, `Decision of ${stage}`),
    el("h2", { class: "mono" }, breakable(subject)),
    el("p", {}, el("span", { class: `tag ${accepted ? "yes" : "no"}` }, accepted ? "done" : "refused")),
    el("p", {}, reason),
    named.length ? [el("h3", {}, "Stages that it speaks of"), some(named, toStage)] : null,
  ];
};

draws.nothing = function nothing() {
  return [
    el("h2", {}, "Select anything"),
    el(
      "p",
      { class: "muted" },
      "A kernel, a stage, a wait, a tensor or a decision: what is known of it stands here, with its TEs and its CUDA text.",
    ),
    facts([
      ["model", el("span", { class: "mono" }, report.name)],
      ["level", `${report.shown}: ${shown.summary}`],
      ["precision", report.options.precision],
      ["fusion", report.options.fusion],
      ["partition", report.options.partition],
      ["waits", report.options.waits],
      ["left out", report.options.disable.length ? report.options.disable.join(", ") : null],
      ["GPU", `${report.device.arch}${report.device.predicted_on ? `, times of ${report.device.predicted_on}` : ""}`],
      ["constants", bytes(shown.constant_bytes)],
      ["workspace", bytes(shown.workspace_bytes)],
      ["made by", `Souffle ${report.souffle}`],
    ]),
    el("h3", {}, "Questions"),
    el(
      "ul",
      {},
      [
        [
          "Why are two stages in different kernels, or why is there a wait?",
          "Select the one that reads: below Needs stands what is between.",
          "program",
        ],
        ["Which tensor costs most bytes?", "Tensors are in that order.", "tensors"],
        ["Why was something not done?", "Decisions that were refused say so.", "decisions"],
      ].map(([question, answer, tab]) => el("li", {}, goTab(tab, question), el("div", { class: "muted" }, answer))),
    ),
    el("h3", {}, "Keys"),
    facts(
      [
        ["/", "search this part"],
        ["1 … 7", "the parts"],
        ["arrows", "through lists; left and right close and open kernels"],
        ["enter", "into the panel"],
        ["esc", "out of the search or the panel"],
      ].map(([key, words]) => [el("kbd", {}, key), words]),
    ),
  ];
};

const goTab = (tab, words) => el("button", { class: "link", type: "button", onclick: () => showTab(tab) }, words);

function drawDetail() {
  const made = selected.kind ? draws[selected.kind](selected.number) : draws.nothing();
  panel.replaceChildren(...made.flat(3).filter(Boolean));
  panel.scrollTop = 0;
}
