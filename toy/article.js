// ---------------- the article's figures, below the tree

  const facts = JSON.parse($("facts").textContent);
  const exp = Math.exp, log = Math.log;
  const parse = (text) => Object.fromEntries(new URLSearchParams(text));
  const write = (outputs, texts) => outputs.forEach((output, k) => (output.textContent = texts[k]));
  const redraws = []; // of all figures, when the window changes

  // Sliders: [name, label, lowest, highest, step, how to write the value]. A button with a value sets
  // what the value says. After each change draw(state, figure) draws everything anew.
  function live(id, start, sliders, draw) {
    const figure = $(id).querySelector("figure"), state = parse(start);
    const rows = sliders.map(([name, label, min, max, step, format]) => {
      const input = Object.assign(make("input"), { type: "range", name: `${id}-${name}`, min, max, step });
      const shown = make("output");
      input.oninput = () => set({ [name]: input.value });
      figure.querySelector(".sliders").append(make("label", "", make("span", "", label), input, shown));
      return { name, input, shown, format: format ?? String };
    });
    const buttons = [...figure.querySelectorAll("button[value]")];
    for (const button of buttons) button.onclick = () => set(parse(button.value));
    function set(change) {
      Object.assign(state, change);
      draw(state, figure); // it may bring state back into its bounds
      for (const { name, input, shown, format } of rows) {
        input.value = state[name];
        shown.textContent = format(Number(state[name]));
        input.setAttribute("aria-valuetext", shown.textContent);
      }
      for (const button of buttons) {
        const values = Object.entries(parse(button.value));
        button.toggleAttribute("aria-current", values.every(([key, value]) => state[key] === value));
      }
    }
    redraws.push(() => set({}));
    set({});
  }
  addEventListener("resize", () => redraws.forEach((redraw) => redraw()));

  // In the notebook's frame a link to a section would open the notebook in it: its address is the frame's.
  addEventListener("click", (event) => {
    const link = event.target.closest('a[href^="#"]');
    if (!link) return;
    event.preventDefault();
    const section = document.querySelector(link.getAttribute("href"));
    section.scrollIntoView();
    section.tabIndex = -1;
    section.focus(); // so that the keyboard continues from there
  });

  // A guess reveals its answer, and presses the button of the figure that shows it, if there is one.
  for (const guess of document.querySelectorAll(".guess")) {
    const answer = guess.querySelector("p[hidden]"), verdict = make("b");
    answer.prepend(verdict);
    const choices = [...guess.querySelectorAll("button")];
    for (const button of choices) {
      button.onclick = () => {
        for (const other of choices) other.setAttribute("aria-pressed", other === button);
        verdict.textContent = "right" in button.dataset ? "Yes. " : "No. ";
        answer.hidden = false;
        const buttons = [...guess.closest("section").querySelectorAll("button[value]")];
        buttons.find(({ value }) => value === guess.dataset.press)?.click();
      };
    }
  }

  // Lines in a frame. x, y: [lowest, highest, ticks, label]; lines: [class, points [x, y]].
  function plot(host, [x0, x1, xTicks, xLabel], [y0, y1, yTicks, yLabel], lines) {
    const width = host.clientWidth || 640, height = 230, left = 34, bottom = 38;
    const X = (x) => left + ((x - x0) / (x1 - x0)) * (width - left - 12);
    const Y = (y) => 18 + ((y1 - y) / (y1 - y0)) * (height - 18 - bottom);
    const clip = (y) => Math.min(y1, Math.max(y0, y));
    const place = (points) => points.map(([x, y]) => `${X(x).toFixed(1)} ${Y(clip(y)).toFixed(1)}`);
    host.innerHTML = `<svg width="${width}" height="${height}" role="img" aria-label="${yLabel}">
      ${yTicks.map((y) => `<path d="M${left} ${Y(y)}H${width - 12}"/>
        <text x="${left - 6}" y="${Y(y) + 4}" text-anchor="end">${y}</text>`).join("")}
      ${xTicks.map((x) => `<text x="${X(x)}" y="${height - 22}" text-anchor="middle">${x}</text>`).join("")}
      <text x="${left}" y="10">${yLabel}</text>
      <text x="${width - 12}" y="${height - 5}" text-anchor="end">${xLabel}</text>
      ${lines.map(([name, points]) => `<path class="${name}" d="M${place(points).join("L")}"/>`).join("")}</svg>`;
  }

  // ---------------- push = credit + tax

  const answers = [1, 2, 3, 4].map((i) => [`w${i}`, `w of answer ${i}`, 0, 0.6, 0.05, (w) => w.toFixed(2)]);
  live("identity", "w1=0.25&w2=0.2&w3=0.5&w4=0.25&won=1010", answers, (state, figure) => {
    const w = [1, 2, 3, 4].map((i) => Number(state[`w${i}`]));
    const A = [...state.won].map((won) => Number(won) - 0.5);
    const c = w.map((weight, i) => weight * A[i]);
    const cards = [["so", 4], ["7+8=15", 2]].map(([text, n]) => {
      const rows = c.slice(0, n).map((push, i) => {
        const kind = A[i] > 0 ? "win" : "lose", who = (A[i] > 0 ? "▲" : "▼") + (i + 1);
        const why = `${plain(w[i])}×${bracketed(A[i])}`;
        return make("div", `line ${kind}`, make("span", "who", who), make("small", "", why),
          drawBar(push, 0.4), make("output", "", signed(push)));
      });
      const head = make("div", "head", make("span", "text", text));
      return make("div", "card", head, ...rows, ...drawSums(account(c.slice(0, n), A.slice(0, n)), 0.4));
    });
    figure.querySelector(".cards").replaceChildren(...cards);
  });

  // ---------------- the clip: all lines were computed by losses.py

  // A panel: two lines in a frame, and the gap between them, for ratios and |push| / |A| up to 2.
  const WIDE = 150, HIGH = 110;
  for (const [name, weights] of Object.entries(facts.clips)) {
    const place = (w, k) => `${((facts.ratios[k] / 2) * WIDE).toFixed(1)},${((1 - w / 2) * HIGH).toFixed(1)}`;
    const [win, lose] = weights.map((line) => line.map(place));
    const panel = make("div");
    panel.innerHTML = `<svg class="panel" viewBox="-14 -20 172 148"><text y="-7" class="name">${name}</text>
      <polygon class="gap" points="${[...win, ...lose.toReversed()].join(" ")}"/>
      <path class="axis" d="M0 0V${HIGH}H${WIDE}M${WIDE / 2} ${HIGH}v4"/>
      <polyline class="win" points="${win.join(" ")}"/><polyline class="lose" points="${lose.join(" ")}"/>
      <path class="at"/><text x="${WIDE / 2}" y="${HIGH + 15}" class="middle">1</text>
      <text x="${WIDE}" y="${HIGH + 15}" class="middle">2</text>
      <text x="${WIDE * 0.75}" y="${HIGH + 15}" class="middle label">ratio r</text>
      <text x="5" y="8" class="label">|push| / |A|</text>
      <text x="-4" y="${HIGH / 2 + 4}" class="end">1</text><text x="-4" y="8" class="end">2</text></svg>`;
    panel.append(make("output"));
    $("clip").querySelector(".panels").append(panel);
  }
  // It goes over the ratios 0.01, 0.03, .., none of them at the edge of a range, where a rounding decides.
  live("clip", "r=0.61", [["r", "ratio r of the token", 0.01, 1.99, 0.02, (r) => r.toFixed(2)]], (state, figure) => {
    const k = facts.ratios.indexOf(Number(state.r));
    Object.values(facts.clips).forEach(([win, lose], i) => {
      const panel = figure.querySelectorAll(".panels div")[i], net = win[k] - lose[k];
      panel.querySelector(".at").setAttribute("d", `M${(facts.ratios[k] / 2) * WIDE} 0v${HIGH}`);
      const verdict = !win[k] && !lose[k] ? "no push" : net ? `net push ${signed(net)}` : "cancels";
      panel.querySelector("output").textContent = `▲${win[k].toFixed(2)} ▼${lose[k].toFixed(2)}\n${verdict}`;
    });
  });

  // ---------------- lengths: the expected update of claim C18, by two logits

  const GROUP = 4, UPDATES = 120, FIRST = 0.8;

  // The policy's expected reward before each update and after the last. length: the divisor of an
  // answer; local: whether there is a prefix baseline; ofGroup: whether A subtracts the group
  // mean. world: lengths a to d, and q, the worse strategy's probability to be right.
  function rewards({ a, b, c, d, q }, length, local, ofGroup) {
    const logits = [2, 0], path = [];
    let rate;
    for (let k = 0; ; k++) {
      const [better, good] = logits.map((x) => 1 / (1 + exp(-x)));
      const outcomes = [ // probability, length, reward, and the slope of log pi by the two logits
        [better * good * 0.6, a, 1, [1 - better, 1 - good]],
        [better * good * 0.4, b, 0, [1 - better, 1 - good]],
        [better * (1 - good), b, 0, [1 - better, -good]],
        [(1 - better) * q, c, 1, [-better]],
        [(1 - better) * (1 - q), d, 0, [-better]],
      ].map(([p, T, R, slopes]) => ({ p, w: 1 / length(Number(T)), R, slopes }));
      const expected = sum(outcomes.map(({ p, R }) => p * R));
      path.push(expected);
      if (k === UPDATES) return path;
      for (const o of outcomes) o.push = o.w * (o.R - expected) * (ofGroup ? 1 - 1 / GROUP : 1);
      const update = logits.map((_, j) => {
        const visitors = outcomes.filter(({ slopes }) => j in slopes); // of the choice's prefix
        const P = sum(visitors.map(({ p }) => p));
        const of = (f) => sum(visitors.map((o) => (o.p / P) * f(o)));
        const others = local ? of((o) => o.push) : 0; // what they push on average
        // The group mean contains the answer's own reward, which comes back in the others' pushes.
        const leak = local && ofGroup ? (of((o) => o.w) * (1 - (1 - P) ** (GROUP - 1))) / GROUP : 0;
        return P * of((o) => (o.push - others + leak * o.R) * o.slopes[j]);
      });
      rate ??= FIRST / Math.hypot(...update);
      update.forEach((x, j) => (logits[j] += rate * x));
    }
  }

  const lengths = ["better strategy, right", "better strategy, wrong", "worse strategy, right", "worse strategy, wrong"];
  const ofWorld = (values) => values.map((x, k) => `${"abcdq"[k]}=${x}`).join("&");
  const equal = [16, 16, 16, 16, 0];
  for (const [name, values] of [["all lengths equal", equal], ...facts.worlds]) {
    $("presets").append(Object.assign(make("button", "", name), { value: ofWorld(values) }), " ");
  }
  live("lengths", `${ofWorld(facts.worlds.at(-1)[1])}&baseline=fixed`, [
    ...lengths.map((label, k) => ["abcd"[k], `${label}: tokens`, 1, 40, 1]),
    ["q", "worse strategy: probability to be right", 0, 0.5, 0.05, (q) => q.toFixed(2)],
  ], (state, figure) => {
    const ofGroup = state.baseline === "group", own = (T) => T;
    const curves = [[own, false], [own, true], [() => 1, false]];
    const paths = curves.map(([length, local]) => rewards(state, length, local, ofGroup));
    write(figure.querySelectorAll(".keys output"), paths.map((path) => path.at(-1).toFixed(3)));
    const lines = [2, 0, 1].map((i) => ["abc"[i], paths[i].map((y, x) => [x, y])]);
    plot(figure.querySelector(".plot"), [0, UPDATES, [0, 30, 60, 90, 120], "updates"],
      [0, 0.6, [0, 0.2, 0.4, 0.6], "expected reward"], lines);
  });

  // ---------------- the crumb

  const logFactorial = [0];
  for (let k = 1; k < 200; k++) logFactorial.push(logFactorial.at(-1) + log(k));

  // The expected A of a rare answer minus the expected A of a usual one, where a share p of all
  // answers is rare, by enumeration: of the N - 1 others, a are rare and right, b rare and wrong. A
  // rare answer earns 1 with probability q, else 0; a usual one earns c. A is divided by the std of N
  // rewards. (In a batch the other groups' answers are like the own group's, so only a factor differs.)
  function pull(p, q, c, N) {
    const chances = [p * q, p * (1 - q), 1 - p].map(log);
    let total = 0;
    for (let a = 0; a < N; a++) {
      for (let b = 0; a + b < N; b++) {
        const counts = [a, b, N - 1 - a - b];
        const chance = exp(logFactorial[N - 1] + sum(counts.map((k, i) => (k ? k * chances[i] : 0) - logFactorial[k])));
        if (chance < 1e-13) continue;
        const A = (R) => {
          const mean = (R + a + counts[2] * c) / N, square = (R * R + a + counts[2] * c * c) / N;
          const deviation = Math.sqrt((Math.max(0, square - mean * mean) * N) / (N - 1));
          return (R - mean) / (deviation + 1e-4);
        };
        total += chance * (q * A(1) + (1 - q) * A(0) - A(c));
      }
    }
    return total * ((1 - 1 / 8) / (1 - 1 / N));
  }
  const SHARES = Array.from({ length: 61 }, (_, k) => 1 / (1 + exp(6.9 - (13.8 * k) / 60)));

  live("crumb", "c=0.1&q=0.45&p=5&B=8", [
    ["c", "the format bonus", 0, 0.6, 0.01, (c) => c.toFixed(2)],
    ["q", "rare strategy: probability of a reward of 1", 0.05, 0.95, 0.05, (q) => q.toFixed(2)],
    ["p", "rare strategy: share at the start", 1, 99, 1, (p) => `${p}%`],
    ["B", "prompts per batch", 1, 16, 1],
  ], ({ c, q, p, B }, figure) => {
    [c, q, p, B] = [c, q, p / 100, B].map(Number);
    const scales = {
      "group's std": (x) => pull(x, q, c, 8),
      "batch's std": (x) => pull(x, q, c, 8 * B),
      "nothing": () => (1 - 1 / 8) * (q - c),
    };
    const cells = Object.entries(scales).flatMap(([name, f]) => {
      const pulls = SHARES.map(f), start = Math.abs(f(p)) > 1e-9 ? f(p) : 0;
      // The share moves while the pull keeps its sign: to all or none, or to where the pull turns.
      const turns = SHARES.filter((x, k) => (x - p) * start > 0 && pulls[k] * start <= 0);
      let end = !start ? p : turns[0] ?? Number(start > 0);
      for (let from = p, k = 0; turns.length && k < 30; k++) {
        const middle = (from + end) / 2;
        if (f(middle) * start > 0) from = middle;
        else end = middle;
      }
      const strip = make("div", "strip", ...pulls.map((y) => make("i", y > 1e-9 ? "win" : y < -1e-9 ? "lose" : "")));
      const mark = make("b");
      mark.style.left = `${((log(p / (1 - p)) + 6.9) / 13.8) * 100}%`;
      strip.append(mark);
      const reward = (end * q + (1 - end) * c).toFixed(3);
      return [make("span", "", name), strip,
        make("span", "", "pull ", make("output", "", signed(start)), " ends at ", make("output", "", reward))];
    });
    const heads = ["A divided by", "", "at the start; reward at the end"];
    const axis = make("div", "head axis", ...["0.1%", "50%", "99.9%"].map((text) => make("span", "", text)));
    figure.querySelector(".strips")
      .replaceChildren(...heads.map((text) => make("span", "head", text)), ...cells, make("span"), axis);
  });
