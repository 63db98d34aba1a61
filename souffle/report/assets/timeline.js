// The predicted time line: launches and their stages, each as wide as it is predicted to take.

function timeSegments() {
  const segments = [];
  let now = 0;
  launches.forEach((launch, number) => {
    const kernel = kernels[launch.kernel];
    const start = now;
    const push = (seconds, given) => {
      if (seconds > 0) segments.push({ start: now, end: (now += seconds), launch: number, ...given });
    };
    push(kernel.launch_seconds, { kind: "launch", number, color: "--launch", words: "launch" });
    const own = new Map();
    for (const wait of waitsOfLaunch[launch.like]) {
      const at = position[waits[wait].at];
      own.set(at, [...(own.get(at) ?? []), wait]);
    }
    // A kernel takes longer than its stages where they read constants that stay on chip, before all their runs, and less
    // where some are computed side by side.
    const rest = kernel.seconds - kernel.launch_seconds - kernel.wait_seconds - kernel.code_seconds;
    const alone = launch.stages.reduce((sum, stage) => sum + stages[stage].seconds, 0);
    const share = alone > rest ? rest / alone : 1;
    const besides = share < 1 ? ", less than alone since some are side by side" : "";
    push(rest - alone > 1e-9 ? rest - alone : 0, {
      kind: "launch",
      number,
      color: "--code",
      words: "constants that are read once, and stay on chip for all steps",
    });
    launch.stages.forEach((stage, place) => {
      for (const wait of own.get(place) ?? [])
        push(waits[wait].seconds, {
          kind: "wait",
          number: wait,
          color: `--${waits[wait].scope}`,
          words: `${SCOPES[waits[wait].scope]} × ${waits[wait].runs}`,
        });
      push(stages[stage].seconds * share, {
        kind: "stage",
        number: stage,
        bound: stages[stage].bound,
        words: `${stages[stage].name}${stages[stage].runs > 1 ? ` × ${stages[stage].runs}` : ""}, bound by ${boundName(stages[stage].bound)}${besides}`,
      });
    });
    push(kernel.code_seconds, { kind: "launch", number, color: "--code", words: "machine code that is fetched" });
    segments.push({
      start,
      end: now,
      launch: number,
      kind: "launch",
      number,
      whole: true,
      words: `kernel ${launch.kernel + 1}, ${kernel.name}`,
    });
  });
  return { segments, total: now };
}

function timelineView() {
  const { segments, total } = timeSegments();
  if (!total)
    return el(
      "p",
      { class: "muted" },
      `No times are predicted: no description of a device for ${report.device.arch} was at hand.`,
    );
  const parts = segments.filter((one) => !one.whole);
  let [low, high] = [0, total];
  let hover = -1;
  const canvas = el("canvas", {
    tabindex: "0",
    role: "img",
    "aria-label": `Predicted time line of ${time(total)}; arrow keys go from part to part, + and − change the scale`,
  });
  const words = el("span", {});
  const fit = el(
    "button",
    {
      class: "plain",
      type: "button",
      onclick: () => {
        [low, high] = [0, total];
        draw();
      },
    },
    "All",
  );
  const nearer = el(
    "button",
    { class: "plain", type: "button", "aria-label": "Larger", onclick: () => zoom(0.5) },
    "+",
  );
  const further = el(
    "button",
    { class: "plain", type: "button", "aria-label": "Smaller", onclick: () => zoom(2) },
    "−",
  );
  const node = el("div", { class: "timeline" }, canvas, el("div", { class: "readout" }, words, nearer, further, fit));
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function draw() {
    const wide = canvas.clientWidth;
    if (!wide) return;
    const scale = window.devicePixelRatio || 1;
    const tall = 78;
    canvas.style.height = `${tall}px`;
    canvas.width = wide * scale;
    canvas.height = tall * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.clearRect(0, 0, wide, tall);
    pen.font = "11px ui-sans-serif, system-ui, sans-serif";
    const x = (seconds) => ((seconds - low) / (high - low)) * wide;
    const ink = color("--muted");
    for (const one of segments) {
      const [left, right] = [x(one.start), x(one.end)];
      if (right < 0 || left > wide) continue;
      const gap = right - left > 3 ? 1 : 0;
      if (one.whole) {
        pen.fillStyle = color(one.number % 2 ? "--raised" : "--line");
        pen.fillRect(left, 0, right - left - gap, 20);
        if (right - left > 64) {
          pen.fillStyle = ink;
          pen.fillText(`Kernel ${launches[one.number].kernel + 1}`, Math.max(left, 0) + 6, 14);
        }
      } else {
        pen.fillStyle = color(one.kind === "stage" ? (BOUNDS[one.bound]?.[1] ?? "--unit") : one.color);
        pen.fillRect(left, 24, Math.max(right - left - gap, 0.5), 34);
        const room = Math.floor((Math.min(right, wide) - Math.max(left, 0) - 14) / 6.2);
        if (one.kind === "stage" && room >= 8) {
          pen.fillStyle = color("--on-accent");
          pen.fillText(tail(stages[one.number].name, room), Math.max(left, 0) + 7, 45);
        }
      }
    }
    const marked =
      hover >= 0 ? parts[hover] : parts.find((one) => one.kind === selected.kind && one.number === selected.number);
    if (marked) {
      pen.strokeStyle = color("--ink");
      pen.lineWidth = 2;
      pen.strokeRect(x(marked.start) + 1, 23, Math.max(x(marked.end) - x(marked.start) - 2, 2), 36);
    }
    pen.fillStyle = ink;
    const step = 10 ** Math.floor(Math.log10((high - low) * 1e6)) / 1e6;
    const every = (high - low) / step > 5 ? step : (high - low) / step > 2 ? step / 2 : step / 5;
    for (let at = Math.ceil(low / every) * every; at <= high; at += every) {
      const place = x(at);
      if (place > wide - 44) break;
      pen.fillRect(place, 60, 1, 4);
      pen.fillText(at === 0 ? "0 µs" : micros(at), place + 3, 73);
    }
    const one = marked ?? null;
    words.textContent = one
      ? `${time(one.end - one.start)}, ${percent(one.end - one.start, total)}: ${one.words}`
      : `${time(total)} in ${counted(launches.length, "launch", "launches")}; point at a part, or click it`;
  }

  function zoom(by, at = (low + high) / 2) {
    const span = Math.min(total, Math.max(total / 5e4, (high - low) * by));
    low = Math.min(Math.max(0, at - ((at - low) / (high - low)) * span), total - span);
    high = low + span;
    draw();
  }
  const under = (event) => {
    const box = canvas.getBoundingClientRect();
    const seconds = low + ((event.clientX - box.left) / box.width) * (high - low);
    const upper = event.clientY - box.top < 22;
    return {
      seconds,
      whole: upper ? segments.find((one) => one.whole && one.start <= seconds && seconds < one.end) : null,
      part: parts.findIndex((one) => one.start <= seconds && seconds < one.end),
    };
  };
  let held = null;
  canvas.addEventListener("pointerdown", (event) => {
    held = { x: event.clientX, low, high, moved: false };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (held && event.buttons && Math.abs(event.clientX - held.x) > 4) {
      held.moved = true;
      const shift = Math.min(
        held.low,
        Math.max(held.high - total, ((event.clientX - held.x) / canvas.clientWidth) * (held.high - held.low)),
      );
      [low, high] = [held.low - shift, held.high - shift];
    } else hover = under(event).part;
    draw();
  });
  canvas.addEventListener("pointerleave", () => {
    hover = -1;
    held = null;
    draw();
  });
  canvas.addEventListener("click", (event) => {
    if (held?.moved) return;
    const { whole, part } = under(event);
    if (whole) [low, high] = [whole.start, whole.end];
    const one = whole ?? parts[part];
    if (one) choose(one.kind, one.number);
    draw();
  });
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoom(event.deltaY < 0 ? 0.8 : 1.25, under(event).seconds);
    },
    { passive: false },
  );
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) {
      hover = Math.min(parts.length - 1, Math.max(0, hover + step));
      const one = parts[hover];
      if (one.start < low || one.end > high) {
        const span = high - low;
        low = Math.min(Math.max(0, one.start - span / 4), total - span);
        high = low + span;
      }
      draw();
    } else if (event.key === "Enter" && hover >= 0) choose(parts[hover].kind, parts[hover].number);
    else if (event.key === "+" || event.key === "=") zoom(0.5);
    else if (event.key === "-") zoom(2);
    else return;
    event.preventDefault();
  });
  canvas.addEventListener("blur", () => {
    hover = -1;
    draw();
  });
  new ResizeObserver(draw).observe(canvas);
  themed.push(() => node.isConnected && draw());
  const seen = [...new Set(stages.map((stage) => stage.bound).filter(Boolean))];
  const legend = el(
    "div",
    { class: "key" },
    seen.map((bound) =>
      el("span", {}, el("i", { style: { background: boundColor(bound) } }), `bound by ${boundName(bound)}`),
    ),
    [
      ["grid", "grid barriers"],
      ["flags", "flags"],
    ]
      .filter(([scope]) => waits.some((wait) => wait.scope === scope))
      .map(([scope, name]) => el("span", {}, el("i", { style: { background: `var(--${scope})` } }), name)),
    parts.some((one) => one.color === "--code")
      ? el("span", {}, el("i", { style: { background: "var(--code)" } }), "constants or code that is fetched")
      : null,
    el("span", {}, el("i", { style: { background: "var(--launch)" } }), "launches"),
  );
  return el("div", {}, node, legend);
}
