// The first page: how many kernels, what they cost, what holds them.

function overview() {
  const level = shown;
  const stageSeconds =
    level.predicted_seconds === null
      ? null
      : level.predicted_seconds - level.launch_seconds - level.wait_seconds - level.code_seconds;
  const first = report.levels[0];
  const most = Object.entries(level.bound_seconds).sort((a, b) => b[1] - a[1])[0];
  const launching = level.launches === level.kernels ? "" : `, launched ${counted(level.launches, "time")} in all`;
  const lede = el("p", { class: "lede" });
  if (level.predicted_seconds !== null) {
    lede.append(
      el("b", {}, `${percent(stageSeconds, level.predicted_seconds)} of that is in stages`),
      `, ${percent(level.wait_seconds, level.predicted_seconds)} in waits of blocks for each other, ${percent(level.launch_seconds, level.predicted_seconds)} in launches${level.code_seconds > 0.001 * level.predicted_seconds ? `, ${percent(level.code_seconds, level.predicted_seconds)} in machine code that is fetched` : ""}. `,
    );
    if (most)
      lede.append(
        "Stages are bound by ",
        el("b", {}, boundName(most[0])),
        ` for ${percent(
          most[1],
          Object.values(level.bound_seconds).reduce((a, b) => a + b, 0),
        )} of their time. `,
      );
    if (first !== level && first.predicted_seconds !== null)
      lede.append(
        `${first.level} would take ${time(first.predicted_seconds)} in ${counted(first.launches, "launch", "launches")}. `,
      );
    lede.append(`Times are predicted on ${report.device.predicted_on}, not measured.`);
  } else lede.append(`No times are predicted: no description of a device for ${report.device.arch} was at hand.`);
  const priced = level.predicted_seconds === null ? "." : `, predicted to take ${time(level.predicted_seconds)}.`;
  const figure = (label, value, note, unit = "") =>
    el(
      "div",
      { class: "figure" },
      el("div", { class: "label" }, label),
      el("div", { class: "value" }, value, unit ? el("small", {}, ` ${unit}`) : null),
      el("div", { class: "note" }, note),
    );
  const blockWaits = level.block_syncs ? `${counted(level.block_syncs, "block barrier")}` : "no block barriers";
  return el(
    "div",
    { class: "page" },
    el(
      "h1",
      { class: "headline" },
      `${report.name} at ${level.level} is ${counted(level.kernels, "kernel")} of ${counted(stages.length, "stage")}${launching}${priced}`,
    ),
    lede,
    el(
      "div",
      { class: "figures" },
      figure("Kernels", whole(level.kernels), counted(level.launches, "launch", "launches")),
      figure(
        "Predicted",
        micros(level.predicted_seconds),
        level.predicted_seconds === null ? "not known" : `of it waits ${time(level.wait_seconds)}`,
        level.predicted_seconds === null ? "" : "µs",
      ),
      figure(
        "Global memory",
        bytes(level.bytes_read + level.bytes_written),
        `${bytes(level.bytes_read)} read, ${bytes(level.bytes_written)} written`,
      ),
      figure(
        "Grid barriers",
        whole(level.grid_syncs),
        level.arrivals ? `${counted(level.arrivals, "arrival")} at flags; ${blockWaits}` : blockWaits,
      ),
      figure(
        "Registers",
        level.registers === null ? "–" : whole(level.registers),
        level.registers === null ? "nvcc was not run" : `of ${report.device.registers_of_thread} of a thread`,
      ),
      figure(
        "Certificate",
        el(
          "span",
          {
            class: report.certificate?.verdict === "PROVEN" ? "yes" : "no",
            style: { "font-size": "18px", "font-weight": "600" },
          },
          report.certificate?.verdict ?? "none",
        ),
        (level.certificate ?? "").replace(/^\w+ \((.*)\)$/, "$1"),
      ),
    ),
    el(
      "section",
      {},
      el("h2", {}, "The predicted time line"),
      el(
        "p",
        { class: "about" },
        "Above, launches; below, what runs in them, as wide as it is predicted to take. Stages of a loop stand for all its steps.",
      ),
      timelineView(),
    ),
    report.levels.length > 1 ? levelsTable() : null,
    el(
      "section",
      {},
      el("h2", {}, "What holds the kernels"),
      el(
        "p",
        { class: "about" },
        `What a block asks for, of what a multiprocessor of ${report.device.arch} has; the resource that has room for the fewest blocks bounds how many are resident.`,
      ),
      kernelsTable(),
    ),
    el(
      "div",
      { class: "pair" },
      el(
        "section",
        {},
        el("h2", {}, "The stages that take longest"),
        ranked(
          stages,
          (one) => one.seconds ?? 0,
          (one) => time(one.seconds),
          "stage",
          (one) => boundColor(one.bound),
        ),
      ),
      el(
        "section",
        {},
        el("h2", {}, "The tensors that cost most bytes"),
        ranked(
          tensors,
          (one) => one.read + one.written,
          (one) => bytes(one.read + one.written),
          "tensor",
          () => "var(--memory)",
        ),
      ),
    ),
  );
}

const FEW = 8;

function ranked(all, value, words, kind, color) {
  const order = all
    .map((one, number) => ({ one, number }))
    .filter(({ one }) => value(one) > 0)
    .sort((a, b) => value(b.one) - value(a.one) || a.number - b.number);
  if (!order.length) return el("p", { class: "muted" }, "None is known.");
  const most = value(order[0].one);
  return el(
    "table",
    {},
    el(
      "tbody",
      {},
      order
        .slice(0, FEW)
        .map(({ one, number }) =>
          el(
            "tr",
            {},
            el(
              "td",
              { class: "name" },
              el(
                "button",
                { class: "link mono", type: "button", title: one.name, onclick: () => choose(kind, number) },
                tail(one.name, 46),
              ),
            ),
            el("td", { class: "meter-cell" }, meter([[value(one), color(one)]], most)),
            el("td", { class: "num" }, words(one)),
          ),
        ),
    ),
  );
}

function levelsTable() {
  const slowest = Math.max(...report.levels.map((level) => level.predicted_seconds ?? 0));
  const heaviest = Math.max(...report.levels.map((level) => level.bytes_read + level.bytes_written));
  const row = (level) =>
    el(
      "tr",
      { class: level === shown ? "shown" : "" },
      el("td", {}, el("b", {}, level.level)),
      el("td", { class: "muted wide" }, level.summary),
      el("td", { class: "num" }, whole(level.launches)),
      el("td", { class: "num" }, whole(level.kernels)),
      el("td", { class: "num" }, whole(level.grid_syncs)),
      el("td", { class: "num" }, level.registers ?? "–"),
      el("td", { class: "num" }, bytes(level.bytes_read + level.bytes_written)),
      el(
        "td",
        {},
        meter(
          [
            [level.bytes_read, "var(--memory)"],
            [level.bytes_written, "var(--l2)"],
          ],
          heaviest,
        ),
      ),
      el("td", { class: "num" }, micros(level.predicted_seconds)),
      el(
        "td",
        {},
        level.predicted_seconds === null
          ? null
          : meter(
              [
                [
                  level.predicted_seconds - level.wait_seconds - level.launch_seconds - level.code_seconds,
                  "var(--chain)",
                ],
                [level.wait_seconds, "var(--grid)"],
                [level.code_seconds, "var(--code)"],
                [level.launch_seconds, "var(--launch)"],
              ],
              slowest,
            ),
      ),
    );
  return el(
    "section",
    {},
    el("h2", {}, "Level by level"),
    el(
      "p",
      { class: "about" },
      "Each adds one optimization to the last. Bytes of global memory are split into read and written, times into stages, waits, fetched code and launches.",
    ),
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        { id: "levels" },
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            el("th", {}, "level"),
            el("th", { class: "wide" }, "what it does"),
            ["launches", "kernels", "grid barriers", "registers", "moved"].map((name) =>
              el("th", { class: "num" }, name),
            ),
            el("th", {}),
            el("th", { class: "num" }, "predicted µs"),
            el("th", {}),
          ),
        ),
        el("tbody", {}, report.levels.map(row)),
      ),
    ),
  );
}

function kernelsTable() {
  const { device } = report;
  const order = kernels
    .map((kernel, number) => ({ kernel, number }))
    .sort(
      (a, b) => (b.kernel.seconds ?? 0) * b.kernel.launches.length - (a.kernel.seconds ?? 0) * a.kernel.launches.length,
    );
  const few = order.slice(0, FEW);
  const row = ({ kernel, number }) => {
    const [resource, room] = tightest(kernel);
    const cell = (value, of, words) =>
      el("td", {}, value === null ? "–" : [words, meter([[value, "var(--accent)"]], of)]);
    return el(
      "tr",
      {},
      el(
        "td",
        { class: "name" },
        el(
          "button",
          {
            class: "link mono",
            type: "button",
            title: kernel.name,
            onclick: () => choose("launch", kernel.launches[0]),
          },
          `${number + 1} ${tail(kernel.name.replace(/^kernel\d+_/, ""), 30)}`,
        ),
      ),
      el("td", { class: "num" }, whole(kernel.launches.length)),
      el("td", { class: "num" }, kernel.seconds === null ? "–" : micros(kernel.seconds * kernel.launches.length)),
      el("td", { class: "num" }, whole(kernel.grid_syncs)),
      cell(kernel.registers, device.registers_of_thread, `${kernel.registers} of ${device.registers_of_thread}`),
      cell(
        kernel.shared_bytes,
        device.shared_bytes_of_block,
        `${bytes(kernel.shared_bytes)} of ${bytes(device.shared_bytes_of_block)}`,
      ),
      cell(kernel.threads, device.threads_of_block, `${whole(kernel.threads)} of ${whole(device.threads_of_block)}`),
      el(
        "td",
        {},
        room === null
          ? kernel.blocks_per_sm === null
            ? "–"
            : `${kernel.blocks_per_sm}, as predicted`
          : `${room}, by ${resource}`,
      ),
    );
  };
  return el(
    "div",
    {},
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        {},
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            el("th", {}, "kernel"),
            ["launches", "µs in all", "grid barriers"].map((name) => el("th", { class: "num" }, name)),
            ["registers", "shared memory", "threads", "resident blocks"].map((name) => el("th", {}, name)),
          ),
        ),
        el("tbody", {}, few.map(row)),
      ),
    ),
    order.length > few.length
      ? el(
          "p",
          { class: "muted", style: { "margin-top": "8px" } },
          `and ${whole(order.length - few.length)} more, which take less: `,
          el("button", { class: "link", type: "button", onclick: () => showTab("program") }, "the program"),
        )
      : null,
  );
}

// The resource of a multiprocessor that has room for the fewest blocks of a kernel.
function tightest(kernel) {
  if (!kernel.room) return [null, null];
  return Object.entries(kernel.room).sort((a, b) => a[1] - b[1])[0];
}
