"use strict";
// Shows the held-back samples of the report: filters, sorts and draws a few at a time. Everything that comes from a
// sample becomes a text node; nothing here writes markup, and nothing is fetched.
(() => {
  const PAGE = 25;
  const CUT_CHARACTERS = 2000;
  const CUT_LINES = 40;
  // Characters that show nothing or turn the order of text around are shown by their number instead.
  const SIGNS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]+/gu;

  const { samples, words, tools } = JSON.parse(document.getElementById("samples").textContent);
  const form = document.getElementById("filters");
  const list = document.getElementById("list");
  const count = document.getElementById("count");
  const more = document.getElementById("more");
  const searched = new Map();
  let found = [];
  let shown = 0;
  let printing = false;

  function el(name, attributes, ...children) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) {
      if (value !== null && value !== undefined) node.setAttribute(key, value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  }

  function named(run) {
    const points = [...run].map((sign) => "U+" + sign.codePointAt(0).toString(16).toUpperCase().padStart(4, "0"));
    return points.slice(0, 3).join(" ") + (points.length > 3 ? " and " + (points.length - 3) + " more" : "");
  }

  function write(node, text) {
    let from = 0;
    for (const match of text.matchAll(SIGNS)) {
      node.append(text.slice(from, match.index), el("span", { class: "sign", title: "not shown as such" }, named(match[0])));
      from = match.index + match[0].length;
    }
    node.append(text.slice(from));
  }

  function cutAt(text) {
    let end = CUT_CHARACTERS;
    let line = -1;
    for (let lines = 0; lines < CUT_LINES; lines += 1) {
      line = text.indexOf("\n", line + 1);
      if (line < 0) break;
    }
    if (line >= 0) end = Math.min(end, line);
    if (end >= text.length) return text.length;
    const code = text.charCodeAt(end - 1);
    return code >= 0xd800 && code <= 0xdbff ? end - 1 : end; // never through the middle of a character
  }

  function textBlock(given, kind) {
    const text = given.replaceAll("\r\n", "\n");
    const block = el("div", { class: kind ? "text " + kind : "text", dir: "auto" });
    const end = printing ? text.length : cutAt(text);
    write(block, text.slice(0, end));
    if (end === text.length) return block;
    const all = el("button", { type: "button" }, "Show all " + text.length.toLocaleString("en") + " characters");
    all.addEventListener("click", () => {
      block.replaceChildren();
      write(block, text);
      block.tabIndex = -1;
      block.focus();
    });
    block.append("… ", all);
    return block;
  }

  function said(message) {
    const parts = [];
    if (message.content) parts.push(textBlock(message.content));
    for (const call of message.tool_calls || []) {
      const { name, arguments: given } = call.function || {};
      parts.push(textBlock("calls " + (name || "?") + "(" + (given || "") + ")", "call"));
    }
    if (!parts.length) parts.push(el("p", { class: "faint" }, "No text."));
    return parts;
  }

  function message(one) {
    const role = { system: "System", user: "User", assistant: "Assistant", tool: "Tool" }[one.role] || one.role;
    return el("div", { class: "message" }, el("h4", {}, one.name ? role + " " + one.name : role), ...said(one));
  }

  function conversation(sample) {
    const parts = sample.messages.map(message);
    const box = el("div", {});
    if (parts.length > 2) {
      const earlier = parts.slice(0, -1);
      box.append(el("details", printing ? { open: "" } : {}, el("summary", {}, earlier.length + " earlier messages"), ...earlier));
      box.append(parts[parts.length - 1]);
    } else {
      box.append(...parts);
    }
    if (sample.tools !== null) {
      box.append(el("details", {}, el("summary", {}, "Tools that it could call"), textBlock(tools[sample.tools], "call")));
    }
    return box;
  }

  function ratings(side) {
    const entry = (term, value) => el("div", {}, el("dt", {}, term), el("dd", {}, value));
    const rated = Object.entries(side.ratings || {}).map(([name, value]) => entry(name, value.toLocaleString("en") + " of 10"));
    if (side.score !== null) {
      const passed = side.passed ? "passed" : "not passed";
      rated.push(entry("score", side.score.toFixed(3) + " (" + passed + ")"));
    }
    return rated.length ? el("dl", { class: "ratings" }, ...rated) : null;
  }

  function answerSide(kind, side) {
    const finish = words.finishes[side.finish];
    const answered = side.answer ? said(side.answer) : [el("p", { class: "faint" }, "No answer.")];
    return el(
      "div", { class: "side " + kind }, el("h4", {}, words.sides[kind]), ...answered,
      finish ? el("p", { class: "small faint" }, finish) : null, ratings(side),
    );
  }

  function rightSide(sample) {
    const parts = sample.right_answer
      ? [...said(sample.right_answer), sample.reference ? el("p", { class: "small faint" }, words.references[sample.reference]) : null]
      : [el("p", { class: "faint" }, "None; rated on the rubric alone.")];
    return el("div", { class: "side right" }, el("h4", {}, "Right answer"), ...parts);
  }

  function orders(sample) {
    if (sample.candidate_first === null || sample.incumbent_first === null) return null;
    const preferred = (who) => (who === "tie" ? "neither" : "the " + who);
    return el(
      "ul", { class: "orders" },
      el("li", {}, "Candidate read first: prefers " + preferred(sample.candidate_first)),
      el("li", {}, "Incumbent read first: prefers " + preferred(sample.incumbent_first)),
      el("li", { class: "mark" }, sample.agreed ? "Both orders agree" : "The orders differ, so it is a tie"),
    );
  }

  function article(sample) {
    const change = changeOf(sample);
    const why = sample.unanswered ? "The candidate gave no answer, which counts as a loss." : sample.reason;
    return el(
      "article", { class: "card sample", "aria-labelledby": "s" + sample.number },
      el(
        "h3", { id: "s" + sample.number, tabindex: "-1" }, "Sample " + sample.number,
        el("span", { class: "badge " + sample.outcome }, words.outcomes[sample.outcome]),
        change === null ? null : el("span", { class: "small faint" }, "score " + (change < 0 ? "−" : "+") + Math.abs(change).toFixed(3)),
      ),
      why ? el("p", { class: "small" }, why) : null,
      conversation(sample),
      el("div", { class: "sides" }, rightSide(sample), answerSide("candidate", sample.candidate), answerSide("incumbent", sample.incumbent)),
      orders(sample),
      el("p", { class: "small faint" }, ...(sample.sample_id ? [el("code", {}, sample.sample_id)] : ["The sample was deleted since; the report keeps its copy."])),
    );
  }

  function changeOf(sample) {
    const [mine, theirs] = [sample.candidate.score, sample.incumbent.score];
    return mine === null || theirs === null ? null : mine - theirs;
  }

  function textOf(sample) {
    if (!searched.has(sample)) {
      const messages = [...sample.messages, sample.right_answer, sample.candidate.answer, sample.incumbent.answer];
      const parts = messages.filter(Boolean).flatMap((one) => [
        one.content || "",
        ...(one.tool_calls || []).map((call) => JSON.stringify(call.function || {})),
      ]);
      searched.set(sample, folded(parts.join("\n")));
    }
    return searched.get(sample);
  }

  const folded = (text) => text.normalize("NFKC").toLowerCase();
  const passes = (side, wanted) => !wanted || (side.passed !== null && side.passed === (wanted === "passed"));

  function matches(sample, wanted) {
    const { outcome, orders: agree, reference, q } = wanted;
    if (outcome === "unanswered" ? !sample.unanswered : outcome && sample.outcome !== outcome) return false;
    if (!passes(sample.candidate, wanted.candidate) || !passes(sample.incumbent, wanted.incumbent)) return false;
    if (agree && (sample.agreed === null || sample.agreed !== (agree === "agree"))) return false;
    if (reference && (sample.right_answer !== null) !== (reference === "yes")) return false;
    return !q || textOf(sample).includes(folded(q));
  }

  const lengthOf = (sample) => sample.messages.reduce((sum, one) => sum + (one.content || "").length, 0);
  const byValue = (valueOf, sign) => (one, other) => {
    const [a, b] = [valueOf(one), valueOf(other)];
    if (a === null || b === null) return (a === null) - (b === null) || one.number - other.number; // unscored ones last
    return sign * (a - b) || one.number - other.number;
  };
  const SORTS = {
    asked: (one, other) => one.number - other.number,
    worst: byValue(changeOf, 1),
    best: byValue(changeOf, -1),
    candidate: byValue((sample) => sample.candidate.score, 1),
    incumbent: byValue((sample) => sample.incumbent.score, 1),
    longest: byValue(lengthOf, -1),
  };

  function wantedNow() {
    return Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, String(value).trim()]));
  }

  function draw(atLeast) {
    const end = printing ? found.length : Math.min(found.length, Math.max(atLeast, shown));
    list.append(...found.slice(shown, end).map((sample) => el("li", {}, article(sample))));
    shown = end;
    const left = found.length - shown;
    more.hidden = left === 0;
    more.textContent = "Show " + Math.min(PAGE, left) + " more (" + left.toLocaleString("en") + " left)";
  }

  function redraw(atLeast) {
    list.replaceChildren();
    shown = 0;
    draw(atLeast);
  }

  function apply() {
    const wanted = wantedNow();
    found = samples.filter((sample) => matches(sample, wanted)).sort(SORTS[wanted.sort] || SORTS.asked);
    count.textContent = found.length.toLocaleString("en") + " of " + samples.length.toLocaleString("en") + " samples";
    redraw(PAGE);
  }

  function remember() {
    const kept = new URLSearchParams(Object.entries(wantedNow()).filter(([name, value]) => value && !(name === "sort" && value === "asked")));
    history.replaceState(null, "", kept.size ? "#" + kept : location.pathname + location.search);
  }

  // The address keeps the filters behind its #, so that a view can be sent to somebody who has the page.
  function recall() {
    if (!location.hash.includes("=")) return;
    form.reset();
    for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
      const field = form.elements.namedItem(name);
      if (field) field.value = value;
      if (field && field.selectedIndex === -1) field.selectedIndex = 0;
    }
  }

  let waiting = 0;
  const changed = () => {
    apply();
    remember();
  };
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", changed);
  form.addEventListener("input", (event) => {
    if (event.target.name !== "q") return;
    clearTimeout(waiting);
    waiting = setTimeout(changed, 150);
  });
  form.addEventListener("reset", () => setTimeout(changed, 0));
  more.addEventListener("click", () => {
    const first = found[shown];
    draw(shown + PAGE);
    document.getElementById("s" + first.number).focus();
  });
  window.addEventListener("hashchange", () => {
    if (!location.hash.includes("=")) return;
    recall();
    apply();
  });
  // Paper cannot be unfolded: everything that the filters leave is printed, whole.
  window.addEventListener("beforeprint", () => {
    printing = true;
    redraw(PAGE);
  });
  window.addEventListener("afterprint", () => {
    printing = false;
    redraw(PAGE);
  });
  recall();
  apply();
})();
