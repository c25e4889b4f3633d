// The forward pass: the state of the rows on the chip, and one row in full.

function range(first, end) {
  return first === end - 1 ? String(first) : `${first} to ${end - 1}`;
}

function queriesText(i) {
  const [r0, r1] = rowsOf(i);
  return `${r1 - r0 === 1 ? "Query" : "Queries"} ${range(r0, r1)}`;
}

function keysText(j) {
  const [k0, k1] = keysOf(j);
  return `${k1 - k0 === 1 ? "key" : "keys"} ${range(k0, k1)}`;
}

function forwardSentence(here) {
  if (here.kind === "finish") {
    const empty = here.j < 0;
    return empty ? `${queriesText(here.i)} see no key: out = 0, lse = −∞.`
      : `${queriesText(here.i)} are done: ${whole.sink ? "the sink joins, then " : ""}out = acc / l, lse = m + ln l.`;
  }
  const kind = recording().classes[here.i][here.j];
  return `${queriesText(here.i)} absorb ${keysText(here.j)}: a ${kind === FULL ? "full tile" : "partial tile, its mask is applied"}.`;
}

const STAYS = {
  forward: { "queries outer": "q, m, l and acc of these queries", "keys outer": "k and v of these keys" },
  backward: { "queries outer": "q, do, lse, delta and dq of these queries", "keys outer": "k, v, dk and dv of these keys" },
};

function movesText({ kind, moves }) {
  const list = (chosen) => chosen.map(([name, size]) => `${name} (${bytesText(Math.abs(size))})`).join(", ");
  const read = moves.filter((m) => m[1] > 0), written = moves.filter((m) => m[1] < 0);
  const parts = [];
  if (read.length) parts.push(`Read: ${list(read)}.`);
  if (written.length) parts.push(`Written: ${list(written)}.`);
  if (!parts.length) parts.push("Nothing moves.");
  if (kind === "tile") parts.push(`What stays on the chip from tile to tile: ${STAYS[view.pass][view.loop]}.`);
  return parts.join(" ");
}

function forwardTable() {
  const here = step(), [r0, r1] = rowsOf(here.i), finish = here.kind === "finish";
  const shadeAcc = scale("signed", largest(recording().acc)), shadeOut = scale("signed", largest(recording().out));
  const last = recording().classes[0].length - 1;
  const body = node("tbody");
  for (let row = r0; row < r1; row++) {
    const before = stateAfter(finish ? last : here.j - 1, row), after = finish ? before : stateAfter(here.j, row);
    const final = vector(recording().out, row), now = finish ? Array.from(final) : answer(after);
    const line = node("tr", { className: row === view.row ? "chosen" : "" }, [node("th", { scope: "row", textContent: String(row) })]);
    line.dataset.row = String(row);
    if (finish) {
      line.append(cell(after.m, { name: "m" }), cell(after.l, { name: "l" }), cell(at(recording().lse, row), { name: "lse" }));
    } else {
      const moved = after.m !== before.m && before.m !== -Infinity ? "change" : "";
      line.append(
        cell(before.m, { name: "m-before" }), cell(after.m, { name: "m", className: moved }),
        cell(at(recording().alpha, here.j, row), { name: "alpha", className: moved }),
        cell(before.l, { name: "l-before" }), cell(after.l, { name: "l" }),
        node("td", { className: "pic" }, [strip(before.acc, shadeAcc, "acc before")]),
      );
    }
    line.append(
      node("td", { className: "pic" }, [strip(after.acc, shadeAcc, "acc")]),
      node("td", { className: "pic" }, [strip(now, shadeOut, "answer so far")]),
      node("td", { className: "pic" }, [strip(final, shadeOut, "final answer")]), cell(distance(now, final), { name: "distance", digits: 3 }),
      cell(seen(after, row), { name: "seen", text: `${(100 * (finish ? 1 : seen(after, row))).toFixed(1)} %` }),
    );
    body.append(line);
  }
  const names = finish ? ["query", "m", "l", "lse", "|acc", "|out = acc / l", "|final", "distance", "seen"]
    : ["query", "m before", "m after", "α", "l before", "l after", "|acc before", "|acc after", "|answer if it stopped here", "|final answer", "distance", "softmax seen"];
  document.getElementById("state-title").textContent = finish ? "The rows leave the chip" : "What survives the tile: m, l and acc of its queries";
  document.getElementById("state").replaceChildren(node("table", {}, [headers(names), body]));
  legend(document.getElementById("state-legend"), shadeOut,
    `answers, one cell for each of ${headDimV} dimensions; acc has its own scale, up to ${fmt(shadeAcc.top, 3)}. Red: the maximum moved, what was summed before is rescaled.`);
}

function sums(entries) {
  const list = node("dl", { className: "sums" });
  entries.forEach(([name, text, value]) => {
    const strong = node("b", { textContent: value === undefined ? "" : fmt(value) });
    list.append(node("dt", { textContent: name }), node("dd", {}, [text + (value === undefined ? "" : " = "), strong]));
  });
  return list;
}

function tileSummary(here, row) {
  const [k0, k1] = keysOf(here.j);
  const m = stateAfter(here.j, row).m;
  let top = -Infinity, total = 0;
  for (let key = k0; key < k1; key++) {
    const s = at(whole.scores, row, key);
    top = Math.max(top, s);
    if (s !== -Infinity) total += Math.exp(s - m);
  }
  return { top, total };
}

function forwardRow() {
  const here = step(), row = view.row, last = recording().classes[0].length - 1;
  const finish = here.kind === "finish";
  const before = stateAfter(finish ? last : here.j - 1, row), after = finish ? before : stateAfter(here.j, row);
  const final = vector(recording().out, row), now = finish ? Array.from(final) : answer(after);
  document.getElementById("row-title").textContent = `Query ${row}, step by step`;
  const parts = [];
  if (finish) {
    if (whole.sink) parts.push(["sink", `one more key of value 0 and score ${fmt(at(whole.sink, 0))}: m, l and acc are rescaled once more`]);
    parts.push(["out", here.j < 0 ? "no key was visible: 0" : `acc / l, the only division of the row; l`, here.j < 0 ? undefined : after.l]);
    parts.push(["lse", "m + ln l, kept for the backward pass", at(recording().lse, row)]);
  } else {
    const { top, total } = tileSummary(here, row), alpha = at(recording().alpha, here.j, row);
    parts.push(["m", `max(${fmt(before.m)}, largest score here ${fmt(top)})`, after.m]);
    parts.push(["α", after.m === -Infinity ? "nothing is visible yet: nothing to rescale" : `exp(${fmt(before.m)} − ${fmt(after.m)}), rescales what was summed before`, alpha]);
    parts.push(["l", `α · l + Σ p  =  ${fmt(alpha)} · ${fmt(before.l)} + ${fmt(total)}`, after.l]);
    parts.push(["acc", `α · acc + p · V, ${headDimV} numbers, not yet divided`]);
    parts.push(["seen", "softmax sum up to here over the final one", seen(after, row)]);
  }
  const panel = document.getElementById("row-panel");
  const caption = finish ? "The answer" : "Filled: the answer acc / l if the loop stopped here. Outlined: the final answer.";
  const chart = node("figure", {}, [bars(now, final, `Query ${row}: answer so far against the final one, largest distance ${fmt(distance(now, final))}`), node("figcaption", { textContent: caption })]);
  const distances = Array.from({ length: last + 1 }, (_, j) => distance(answer(stateAfter(j, row)), final));
  const marked = finish ? last : here.j;
  const falling = node("figure", {}, [
    fallOff(distances, marked, `Distance of the prefix answer from the final one after each tile of keys: ${distances.map((x) => fmt(x, 3)).join(", ")}`,
      distances.map((_, j) => `…${keysOf(j)[1] - 1}`)),
    node("figcaption", { textContent: whole.sink ? "Distance to the final answer after each tile of keys; the sink is still to come." : "Distance to the final answer after each tile of keys." }),
  ]);
  panel.replaceChildren(sums(parts), chart, falling);
}
