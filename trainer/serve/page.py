"""A small page to try the model in a browser. It loads nothing from other servers."""

from __future__ import annotations

import html
import json
from string import Template

_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>$name</title>
<style nonce="$nonce">
:root { color-scheme: light dark; --page: #fff; --ink: #1c2024; --faint: #5f6770; --line: #c9ced6; --box: #f5f6f8;
  --main: #1f5fbf; --on-main: #fff; --wrong: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --page: #15181c; --ink: #e3e6ea; --faint: #9aa3ad; --line: #3d444d;
  --box: #1e2329; --main: #7fb0ff; --on-main: #10151c; --wrong: #ff9d94; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 0 auto; padding: 1.5rem 1rem 3rem;
  color: var(--ink); background: var(--page); }
h1 { font-size: 1.3rem; line-height: 1.3; margin: 0; overflow-wrap: anywhere; }
header p { margin: 0 0 1.25rem; color: var(--faint); }
label { display: block; font-size: .875rem; color: var(--faint); }
textarea, input { display: block; width: 100%; margin-top: .25rem; font: inherit; font-size: 1rem; color: var(--ink);
  background: var(--page); border: 1px solid var(--line); border-radius: 6px; padding: .5rem .625rem; }
textarea { min-height: 8rem; resize: vertical; }
:focus-visible { outline: 2px solid var(--main); outline-offset: 1px; }
#settings { display: grid; grid-template-columns: repeat(auto-fit, minmax(6.5rem, 1fr)); gap: .75rem;
  margin: .75rem 0; }
[hidden] { display: none; }
#actions { display: flex; flex-wrap: wrap; align-items: center; gap: .5rem .75rem; margin: 1rem 0; }
button { font: inherit; min-height: 2.75rem; padding: 0 1.25rem; border-radius: 6px; border: 1px solid var(--line);
  color: var(--ink); background: var(--page); cursor: pointer; }
#go { background: var(--main); border-color: var(--main); color: var(--on-main); font-weight: 600; }
button:disabled { opacity: .45; cursor: default; }
#state { color: var(--faint); }
#state.wrong { color: var(--wrong); flex-basis: 100%; }
#answer { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--box); border-radius: 6px; padding: 1rem;
  min-height: 6rem; }
#given { color: var(--faint); }
#answer:not(.started)::before { content: "The text appears here."; color: var(--faint); }
</style></head><body>
<header><h1>$name</h1><p>A window of $window tokens for prompt and text.</p></header>
<main>
<label>$ask<textarea id="prompt" autofocus></textarea></label>
<div id="settings">
<label>Most tokens <input id="max_tokens" type="number" value="64" min="1"></label>
<label>Temperature <input id="temperature" type="number" value="0.8" min="0" step="0.1"></label>
<label>Top-k <input id="top_k" type="number" value="40" min="0"></label>
<label>Top-p <input id="top_p" type="number" value="1" min="0" max="1" step="0.05"></label>
<label>Seed <input id="seed" type="number" placeholder="random"></label>
</div>
<label$keyless>API key <input id="key" type="password" autocomplete="off"></label>
<div id="actions"><button id="go" title="Ctrl+Enter">Generate</button>
<button id="stop" disabled>Stop</button><span id="state" role="status"></span></div>
<div id="answer" aria-live="polite"><span id="given"></span><span id="text"></span></div>
</main>
<script nonce="$nonce">
const model = $model;
const at = (id) => document.getElementById(id);
let control = null, began = 0, reason = "";
function tell(text, wrong = false) {
  at("state").textContent = text;
  at("state").classList.toggle("wrong", wrong);
}
function body() {
  const made = { model, prompt: at("prompt").value, stream: true, stream_options: { include_usage: true } };
  for (const id of ["max_tokens", "temperature", "top_k", "top_p", "seed"])
    if (at(id).value !== "") made[id] = Number(at(id).value);
  return JSON.stringify(made);
}
function show(line) {
  if (line === "[DONE]") return;
  const event = JSON.parse(line);
  if (event.error) throw new Error(event.error.message);
  for (const choice of event.choices) {
    at("text").append(choice.text);
    if (choice.finish_reason) reason = choice.finish_reason;
  }
  if (event.usage) {
    const seconds = ((performance.now() - began) / 1000).toFixed(1);
    const end = reason === "length" ? "" : ", the model ended the text", count = event.usage.completion_tokens;
    tell(count + (count === 1 ? " token" : " tokens") + " in " + seconds + " s" + end);
  }
}
async function generate() {
  if (at("go").disabled) return;
  control = new AbortController();
  began = performance.now();
  at("go").disabled = true; at("stop").disabled = false;
  tell("..."); at("text").textContent = "";
  at("given").textContent = $glm ? "" : at("prompt").value;
  at("answer").classList.add("started");
  const headers = { "Content-Type": "application/json" };
  if (at("key").value) headers.Authorization = "Bearer " + at("key").value;
  try {
    const answer = await fetch("/v1/completions", { method: "POST", headers, body: body(), signal: control.signal });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const parts = (rest + value).split("\\n\\n");
      rest = parts.pop();
      for (const part of parts) show(part.replace(/^data: /, ""));
    }
  } catch (error) {
    const stopped = error.name === "AbortError";
    tell(stopped ? "stopped" : error.message, !stopped);
  }
  at("go").disabled = false; at("stop").disabled = true;
}
at("go").addEventListener("click", generate);
at("stop").addEventListener("click", () => control && control.abort());
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) generate();
});
const initial = new URLSearchParams(location.search).get("prompt");
if (initial !== null) { at("prompt").value = initial; generate(); }
</script></body></html>
""")


def page(name: str, window: int, nonce: str, *, glm: bool, with_key: bool) -> str:
    """Return the page of a model as HTML; `with_key`: whether the server asks for an API key."""
    ask = "Text with [MASK], [sMASK] or [gMASK]" if glm else "Text to continue"
    # Escape "<", so that a name cannot end the script element.
    model = json.dumps(name).replace("<", "\\u003c")
    return _PAGE.substitute(
        name=html.escape(name),
        window=window,
        nonce=nonce,
        ask=html.escape(ask),
        model=model,
        glm=json.dumps(glm),
        keyless="" if with_key else " hidden",
    )
