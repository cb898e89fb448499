import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { alsoOf, Bars, DraftDetail } from "./detail";
import { Icon } from "./icon";
import { inField } from "./keys";
import { coin, differs, isTree, label, ORIGINS, ratio, residual, seconds, share } from "./format";
import type { Run } from "./run";
import type { Settings } from "./settings";
import { Tree } from "./tree";
import type { Round } from "./types";

const STAGES = ["Draft", "Score", "Verify", "Commit"] as const;

interface Props {
  run: Run;
  ranWith: Settings | null;
  /** Whether there is anything to run. */
  ready: boolean;
  round: number;
  setRound: (round: number) => void;
  start: () => void;
  stop: () => void;
}

/** One round at a time, in four stages. */
export function Step({ run, ranWith, ready, round: at, setRound, start, stop }: Props) {
  const [stage, setStage] = useState(0);
  const [playing, setPlaying] = useState(false);
  const rounds = run.rounds.filter((one) => one.trace);
  const last = rounds.length * STAGES.length - 1;
  const position = Math.min(at * STAGES.length + stage, Math.max(last, 0));
  // Keys may come faster than what they change is drawn.
  const latest = useRef(position);
  latest.current = position;
  const go = (to: number) => {
    const next = Math.min(Math.max(to, 0), Math.max(last, 0));
    latest.current = next;
    setRound(Math.floor(next / STAGES.length));
    setStage(next % STAGES.length);
  };

  // Another run begins at its first stage, and leaves the focus on the button that it was begun with.
  useLayoutEffect(() => setStage(0), [run.id]);
  const runs = useRef<HTMLButtonElement>(null);
  const focused = runs.current !== null && runs.current === document.activeElement;
  useLayoutEffect(() => {
    if (focused) runs.current?.focus();
  });

  useEffect(() => {
    if (!playing) return;
    if (position >= last && !run.running) {
      setPlaying(false);
      return;
    }
    const timer = setTimeout(() => go(position + 1), 900);
    return () => clearTimeout(timer);
  }, [playing, position, last, run.running]);

  useLayoutEffect(() => {
    const pressed = (event: KeyboardEvent) => {
      const target = event.target as HTMLElement;
      if (inField(target) || event.ctrlKey || event.metaKey || event.altKey) return;
      if (document.querySelector("dialog[open]")) return; // as those of the page
      if (target.closest(".output")) return;
      // A button takes space for itself, but for the one that was pressed to come here.
      if (event.key === " " && !target.closest("button:not([aria-current])")) setPlaying((old) => !old);
      else if (event.key === "ArrowRight") go(latest.current + 1);
      else if (event.key === "ArrowLeft") go(latest.current - 1);
      else if (event.key === "Home") go(0);
      else if (event.key === "End") go(last);
      else return;
      event.preventDefault();
    };
    window.addEventListener("keydown", pressed);
    return () => window.removeEventListener("keydown", pressed);
  });

  const round = rounds[Math.floor(position / STAGES.length)];
  if (!round) {
    return (
      <div class="empty">
        <p>{ready || run.running ? "No round yet." : "No round yet, and nothing to run: type a prompt in Write."}</p>
        <button type="button" ref={runs} class="primary" data-run={!run.running || undefined} disabled={!ready && !run.running} onClick={run.running ? stop : start}>
          {run.running ? "Stop" : "Run the prompt"}
        </button>
        {run.error && <p class="error" role="alert">{run.error}</p>}
      </div>
    );
  }
  const index = rounds.indexOf(round);
  return (
    <div class="step">
      <div class="player">
        <button type="button" onClick={() => go(0)} disabled={position === 0} aria-label="First round">
          <Icon name="first" />
        </button>
        <button type="button" onClick={() => go(position - 1)} disabled={position === 0} aria-label="Back">
          <Icon name="back" />
        </button>
        <button type="button" class="primary" onClick={() => setPlaying(!playing)} aria-label={playing ? "Pause" : "Play"}>
          <Icon name={playing ? "pause" : "play"} />
        </button>
        <button type="button" onClick={() => go(position + 1)} disabled={position === last} aria-label="Forward">
          <Icon name="forward" />
        </button>
        <button type="button" onClick={() => go(last)} disabled={position === last} aria-label="Last round">
          <Icon name="last" />
        </button>
        <input
          type="range"
          min={0}
          max={last}
          value={position}
          aria-label="Round and stage"
          aria-valuetext={`round ${round.round}, ${STAGES[stage]}`}
          onInput={(event) => go(event.currentTarget.valueAsNumber)}
        />
        <span class="position">
          round {round.round} of {rounds.length}
        </span>
        <button type="button" ref={runs} data-run={!run.running || undefined} disabled={!ready && !run.running} onClick={run.running ? stop : start}>
          {run.running ? "Stop" : "Run again"}
        </button>
      </div>
      {run.error && (
        <p class="error" role="alert">
          {run.error}
        </p>
      )}
      <ol class="stages">
        {STAGES.map((name, number) => (
          <li key={name}>
            <button
              type="button"
              aria-current={number === stage ? "step" : undefined}
              class={number < stage ? "done" : ""}
              onClick={() => go(index * STAGES.length + number)}
            >
              {name}
            </button>
          </li>
        ))}
      </ol>
      <section aria-live="polite" class="stage">
        <p class="explain">{explain(round, stage)}</p>
        <Sheet rounds={rounds.slice(0, index)} round={round} prompt={promptOf(ranWith)} stage={stage} />
        <DraftView key={round.round} round={round} stage={stage} />
      </section>
    </div>
  );
}

function promptOf(settings: Settings | null): string {
  if (!settings) return "";
  return settings.mode === "chat" ? (settings.messages.findLast((one) => one.role === "user")?.content ?? "") + "\n" : settings.prompt;
}

function explain(round: Round, stage: number): string {
  const draft = round.draft!;
  const trace = round.trace!;
  const kept = draft.filter((one) => one.accepted).length;
  const time = (part: string) => seconds(trace.seconds[part] ?? 0);
  const tokens = (count: number) => `${count} ${count === 1 ? "token" : "tokens"}`;
  if (!draft.length && stage !== 3) {
    return ["Nothing is drafted in this round: plain decoding.", `The target scores the last token in one pass (${time("target")}).`, "There is nothing to verify: the next token is drawn from p."][stage]!;
  }
  switch (stage) {
    case 0:
      return `The drafter proposes ${tokens(draft.length)}${isTree(draft) ? " in a tree" : ""} (${time("drafter")}).`;
    case 1:
      return `The target scores all ${draft.length + 1} places in one pass (${time("target")}).`;
    case 2:
      return `${RULES[trace.rule]} Accepted: ${kept} of ${draft.length}.`;
    default: {
      if (!draft.length) return "One token of the target's own is committed.";
      const origin = round.tokens.at(-1)!.origin;
      const next = origin === "accepted" ? "the request ended there" : ORIGINS[origin] === undefined ? "" : NEXT[origin];
      return `${tokens(kept)} of the draft ${kept === 1 ? "is" : "are"} committed, and ${next}. Keys and values of all other draft tokens are dropped.`;
    }
  }
}

const RULES = {
  rejection: "One uniform draws where to stop.",
  greedy: "At temperature 0 a draft token is accepted if it is the target's own choice.",
  coupled: "The target samples with the seed's own noise; draft tokens equal to its picks are accepted.",
};
const NEXT: Record<string, string> = {
  residual: "one token that replaces the rejected one",
  bonus: "one bonus token, for the whole draft was accepted",
  target: "one token of the target's own",
};

/** The text up to the round, and what the stage adds to it. */
function Sheet({ rounds, round, prompt, stage }: { rounds: Round[]; round: Round; prompt: string; stage: number }) {
  const own = useRef<HTMLDivElement>(null);
  // What the round adds is at the end, and has to be in view.
  useLayoutEffect(() => {
    own.current!.scrollTop = own.current!.scrollHeight;
  }, [round, stage]);
  return (
    <div class="output context" ref={own} tabIndex={0} aria-label="Output so far">
      <span class="prompt">{prompt}</span>
      {rounds.map((one) => one.tokens.map((token, at) => (
        <span key={`${one.round}-${at}`} class={`token ${token.origin} past`}>
          {token.text}
        </span>
      )))}
      {stage < 3
        ? round.draft!.length > 0 && !isTree(round.draft!) && (
            <span class="pending">
              {round.draft!.map((one, at) => (
                <span key={at} class={`token ${stage < 2 ? "drafted" : one.accepted ? "accepted" : "rejected"}`}>
                  {one.text.replaceAll("\n", "⏎")}
                </span>
              ))}
            </span>
          )
        : round.tokens.map((token, at) => (
            <span key={at} class={`token ${token.origin} fresh`}>
              {token.text}
            </span>
          ))}
    </div>
  );
}

function DraftView({ round, stage }: { round: Round; stage: number }) {
  const draft = round.draft!;
  const trace = round.trace!;
  const [selected, setSelected] = useState(0);
  // First on show: a token that was rejected where the round stopped, if there is one, or else the last accepted one.
  const rejected = draft.findIndex((one) => one.parent === trace.node) + 1;
  const node = selected || rejected || trace.node;
  const next = round.tokens.at(-1)!;
  const after = next.origin !== "accepted" && (
    <div class="card after">
      <b class={`token ${next.origin}`}>{label(next.token, next.id)}</b>
      <small>{ORIGINS[next.origin]}</small>
      <Bars title={trace.rule === "rejection" && next.origin === "residual" ? `The ${residual(trace.verifier)}` : "p"} candidates={trace.next_top} chosen={next.id} also={{ id: next.id, text: next.token, p: trace.next_p, q: null }} />
    </div>
  );
  if (stage === 3) return <div class="cards">{after}</div>;
  if (!draft.length) return stage === 1 && trace.top[0] ? <Bars title="p of the next token" candidates={trace.top[0]} /> : null;
  return (
    <>
      {isTree(draft) ? (
        <>
          <div class="tree-box">
            <Tree round={round} decided={stage >= 2} selected={node} onSelect={setSelected} />
          </div>
          {stage > 0 && <DraftDetail round={round} node={node} />}
        </>
      ) : (
        <div class="cards" role="list">
          {draft.map((token, at) => {
            const own = coin(round, at + 1);
            const beyond = own === null ? !token.accepted && at > trace.node : own.value > 1;
            return (
              <div key={at} role="listitem" class={`card ${stage >= 2 && beyond ? "beyond" : ""}`}>
                <b class={`token ${stage < 2 ? "drafted" : token.accepted ? "accepted" : "rejected"}`}>{label(token.text, token.id)}</b>
                <small>
                  q {share(token.q)}
                  {stage >= 1 && ` · p ${share(token.p)}`}
                </small>
                {stage === 1 && trace.top[token.parent] && <Bars title={`p${token.q < 1 ? "; the line is q" : ""}`} candidates={trace.top[token.parent]!} chosen={token.id} {...alsoOf(round, token)} />}
                {stage === 2 && trace.rule === "rejection" && (
                  <>
                    <small>
                      min(1, p/q) {share(ratio(token))}
                      {own && !beyond && differs(own.chance, token) && ` · chance here ${share(own.chance)}`}
                    </small>
                    {own && !beyond && <Coin {...own} />}
                    {beyond && <small>not reached</small>}
                  </>
                )}
                {stage === 2 && trace.rule !== "rejection" && <small>{token.accepted ? "the target's pick" : beyond ? "not reached" : "not the target's pick"}</small>}
              </div>
            );
          })}
        </div>
      )}
      {stage === 2 && trace.rule === "rejection" && <Stops round={round} />}
    </>
  );
}

/** The chance of acceptance as a bar, and the uniform on it. */
function Coin({ chance, value }: { chance: number; value: number }) {
  return (
    <svg class="coin" viewBox="0 0 100 16" role="img" aria-label={`uniform ${share(value)}, accepted up to ${share(chance)}`}>
      <rect class="rest" y="5" width="100" height="6" rx="3" />
      <rect class="chance" y="5" width={100 * chance} height="6" rx="3" />
      <circle class={value <= chance ? "in" : "out"} cx={Math.min(Math.max(100 * value, 3), 97)} cy="8" r="4" />
    </svg>
  );
}

/** The probability of stopping at each node, and the uniform that drew one. */
function Stops({ round }: { round: Round }) {
  const trace = round.trace!;
  const names = ["none", ...round.draft!.map((token, at) => (isTree(round.draft!) ? label(token.text, token.id) : String(at + 1)))];
  let from = 0;
  return (
    <figure class="stops">
      <figcaption>
        Where the round stops: the probability of each place, and the uniform {share(trace.stop_uniform!)}
      </figcaption>
      <svg viewBox="0 0 600 46" role="img" aria-label={`stops at ${names[trace.node]}`}>
        {trace.stop_probs.map((value, at) => {
          const x = from * 600;
          from += value;
          return (
            <g key={at} class={at === trace.node ? "drawn" : ""}>
              <rect x={x} y="4" width={Math.max(value * 600 - 1, 0)} height="20" rx="2" />
              {value * 600 > Math.max(36, 12 * names[at]!.length) && (
                <text x={x + value * 300} y="40" text-anchor="middle">
                  {names[at]}
                </text>
              )}
            </g>
          );
        })}
        <path d={`M${trace.stop_uniform! * 600} 0 V28`} />
      </svg>
    </figure>
  );
}
