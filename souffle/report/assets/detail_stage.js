// The panel of a stage and of a kernel in a launch.

const draws = {};

draws.stage = function stage(number) {
  const stage = stages[number];
  const launch = launchOf(number);
  const kernel = kernelOf(number);
  const { device } = report;
  const touch = (one) =>
    el(
      "div",
      {},
      el("span", { class: "tag" }, one.written ? "writes" : "reads"),
      go("tensor", one.tensor, tensors[one.tensor].name),
      el(
        "span",
        { class: "muted" },
        one.where === "global"
          ? `  ${bytes(one.bytes)}`
          : `  in ${PLACES[one.where]}${one.bytes ? `, ${bytes(one.bytes)} read once` : ""}`,
      ),
    );
  const before = new Set(stage.needs_before);
  const inside = stage.tes.flatMap((te) => report.tes[te]?.inside ?? []);
  const own = waitsOfLaunch[launch.like].filter((wait) => waits[wait].at === likeStage(number));
  return [
    el(
      "div",
      { class: "sort" },
      `Stage ${position[number] + 1} of ${launch.stages.length}, `,
      go("launch", stage.launch, `kernel ${launch.kernel + 1}`, false),
      launches.length > 1 ? `, launch ${stage.launch + 1}` : "",
    ),
    el("h2", { class: "mono" }, breakable(stage.name)),
    facts([
      [
        "predicted",
        stage.seconds === null
          ? null
          : `${time(stage.seconds)}${stage.runs > 1 ? ` in ${whole(stage.runs)} runs` : ""}, ${percent(stage.seconds, kernel.seconds)} of its kernel`,
      ],
      ["bound by", stage.bound && boundName(stage.bound)],
      ["tiles", `${whole(stage.tiles)} of ${whole(stage.threads)} threads`],
      ["loop", stage.loop === null ? null : go("loop", stage.loop, `${whole(loops[stage.loop].steps)} steps`, false)],
      ["moves", `${bytes(stageBytes[number])} of global memory`],
      [
        "registers",
        against(
          stage.registers,
          device.registers_of_thread,
          `${stage.registers} of ${device.registers_of_thread}, alone`,
        ),
      ],
      [
        "shared memory",
        against(
          stage.shared_bytes,
          device.shared_bytes_of_block,
          `${bytes(stage.shared_bytes)} of ${bytes(device.shared_bytes_of_block)}, alone`,
        ),
      ],
      ["stack", stage.stack_bytes ? `${bytes(stage.stack_bytes)} of a thread` : null],
    ]),
    own.length
      ? [
          el("h3", {}, "Waits before it"),
          listed(
            own.map((wait) =>
              el(
                "div",
                { class: `why ${waits[wait].scope}` },
                go("wait", wait, SCOPES[waits[wait].scope], false),
                waits[wait].runs > 1 ? ` × ${whole(waits[wait].runs)}` : "",
                `: ${waits[wait].reason}`,
              ),
            ),
          ),
        ]
      : null,
    stage.needs.length || before.size
      ? [
          el("h3", {}, "Needs, and what stands between"),
          some([...new Set([...stage.needs, ...before])], (maker) => [
            toStage(maker),
            before.has(maker) && !stage.needs.includes(maker)
              ? el("span", { class: "muted" }, " of an earlier step")
              : "",
            relation(maker, number),
          ]),
        ]
      : null,
    readers[number].length
      ? [el("h3", {}, "Is read by"), some(readers[number], (reader) => [toStage(reader), relation(number, reader)], 6)]
      : null,
    el("h3", {}, "Tensors"),
    some(stage.touched, touch, 16),
    inside.length
      ? [
          el("h3", {}, "Stay inside"),
          el("p", { class: "muted" }, "Made and read within a tile, never in global memory."),
          some(
            inside,
            ([name, size]) => [el("span", { class: "mono" }, name), el("span", { class: "muted" }, `  ${bytes(size)}`)],
            6,
          ),
        ]
      : null,
    el("h3", {}, `Computes ${counted(stage.tes.length, "TE")}`),
    el(
      "div",
      {},
      stage.tes.map((te) =>
        report.tes[te]
          ? folded(
              te,
              () =>
                el("div", {}, code(report.tes[te].text), el("p", { class: "muted" }, `of ${report.tes[te].origin}`)),
              stage.tes.length === 1,
            )
          : el("div", { class: "mono" }, te),
      ),
    ),
    Object.keys(report.tes).length
      ? null
      : el(
          "p",
          { class: "muted" },
          "The text of TEs is not kept in saved files; make the report of the model to see it.",
        ),
    el("h3", {}, "CUDA text"),
    stage.functions.map((name) =>
      folded(name, () => code(functionText(kernel.module, name) ?? "Its text is not in the module.")),
    ),
    stage.decisions.length
      ? [
          el("h3", {}, counted(stage.decisions.length, "decision")),
          folded("about it and its TEs", () => some(stage.decisions, decisionItem, 30)),
        ]
      : null,
  ];
};

draws.launch = function launch(number) {
  const launch = launches[number];
  const kernel = kernels[launch.kernel];
  const { device } = report;
  const own = waitsOfLaunch[launch.like];
  const section = report.certificate?.kernels.find((one) => one.name === kernel.name);
  const [resource, room] = tightest(kernel);
  const stageSeconds =
    kernel.seconds === null ? null : kernel.seconds - kernel.launch_seconds - kernel.wait_seconds - kernel.code_seconds;
  const about = [...new Set(launch.stages.flatMap((stage) => stages[stage].decisions))].filter(
    (one) => ["partition", "choice"].includes(decisions[one][0]) || decisions[one][1].includes(kernel.name),
  );
  const wholeNetwork = decisions
    .map((_, one) => one)
    .filter((one) => decisions[one][0] === "partition" && !about.includes(one) && launches.length === 1);
  return [
    el(
      "div",
      { class: "sort" },
      `Kernel ${launch.kernel + 1} of ${kernels.length}${kernel.launches.length > 1 ? `, launched ${counted(kernel.launches.length, "time")}` : ""}`,
    ),
    el("h2", { class: "mono" }, breakable(kernel.name)),
    launch.like !== number
      ? el(
          "p",
          { class: "muted" },
          "The same kernel as in ",
          go("launch", launch.like, `launch ${launch.like + 1}`, false),
          ", with other tensors; its waits are told of that one.",
        )
      : null,
    facts([
      [
        "predicted",
        kernel.seconds === null
          ? null
          : `${time(kernel.seconds)} a launch: stages ${time(stageSeconds)}, waits ${time(kernel.wait_seconds)}, launch ${time(kernel.launch_seconds)}${kernel.code_seconds ? `, fetched code ${time(kernel.code_seconds)}` : ""}`,
      ],
      ["stages", whole(launch.stages.length)],
      [
        "tiles",
        `${whole(kernel.tiles)}${kernel.teams > 1 ? `; a block is ${kernel.teams} teams, each of which computes tiles as a block would` : ""}`,
      ],
      [
        "grid barriers",
        `${whole(kernel.grid_syncs)} in a launch${kernel.arrivals ? `, and ${counted(kernel.arrivals, "arrival")} at flags` : ""}`,
      ],
      ["moves", `${bytes(launch.bytes_read)} read, ${bytes(launch.bytes_written)} written`],
      [
        "registers",
        kernel.registers === null
          ? "nvcc was not run"
          : against(
              kernel.registers,
              device.registers_of_thread,
              `${kernel.registers} of ${device.registers_of_thread} of a thread`,
            ),
      ],
      [
        "shared memory",
        against(
          kernel.shared_bytes,
          device.shared_bytes_of_block,
          `${bytes(kernel.shared_bytes)} of ${bytes(device.shared_bytes_of_block)} of a block`,
        ),
      ],
      [
        "threads",
        against(
          kernel.threads,
          device.threads_of_block,
          `${whole(kernel.threads)} of ${whole(device.threads_of_block)} of a block`,
        ),
      ],
      ["spilled", kernel.spill_bytes ? bytes(kernel.spill_bytes) : null],
      ["stack", kernel.stack_bytes ? `${bytes(kernel.stack_bytes)} of a thread` : null],
      ["machine code", kernel.code_bytes ? bytes(kernel.code_bytes) : null],
      [
        "resident blocks",
        room === null
          ? kernel.blocks_per_sm
          : `${room} on a multiprocessor, as many as its ${resource} have room for (${Object.entries(kernel.room)
              .map(([name, count]) => `${name} ${count}`)
              .join(", ")})`,
      ],
      [
        "grid",
        kernel.most_blocks === null
          ? null
          : `at most ${counted(kernel.most_blocks, "block")}: barriers of more take longer than stages get shorter`,
      ],
    ]),
    own.length
      ? [
          el("h3", {}, `Waits at ${counted(own.length, "place")}`),
          some(own, (wait) =>
            el(
              "div",
              { class: `why ${waits[wait].scope}` },
              go(
                "wait",
                wait,
                `${SCOPES[waits[wait].scope]}${waits[wait].runs > 1 ? ` × ${whole(waits[wait].runs)}` : ""}`,
                false,
              ),
              " before ",
              toStage(waits[wait].before),
              el("div", { class: "muted" }, waits[wait].reason),
            ),
          ),
        ]
      : null,
    about.length + wholeNetwork.length
      ? [el("h3", {}, "Why it is a kernel"), some([...wholeNetwork, ...about], decisionItem, 8)]
      : null,
    section
      ? [
          el("h3", {}, "Certificate"),
          el(
            "p",
            {},
            el("b", { class: section.verdict === "PROVEN" ? "yes" : "no" }, section.verdict),
            `: ${section.facts.map(([what, count]) => `${whole(count)} ${what}`).join(", ")}`,
          ),
        ]
      : null,
    el("h3", {}, "Stages"),
    some(launch.stages, toStage, 40),
    el("h3", {}, "CUDA text"),
    folded(kernel.name, () => code(functionText(kernel.module, kernel.name) ?? "Its text is not in the module.")),
  ];
};
