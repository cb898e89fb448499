import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { seconds } from "./format";
import { Legend, Output } from "./output";
import type { Run } from "./run";
import { ready, type Settings } from "./settings";
import type { Status } from "./types";

interface Props {
  settings: Settings;
  change: (part: Partial<Settings>) => void;
  status: Status | null;
  run: Run;
  /** What the run on show was asked for; null before the first. */
  ranWith: Settings | null;
  /** The runs of a chat's answers, by their place among the messages. */
  answers: Readonly<Record<number, Run>>;
  start: () => void;
  stop: () => void;
  clear: () => void;
  choose: (mode: Settings["mode"]) => void;
  onRound: (round: number) => void;
}

/** Completion and chat, streamed. */
export function Write({ settings, change, status, run, ranWith, answers, start, stop, clear, choose, onRound }: Props) {
  const chat = settings.mode === "chat";
  const [unfolded, setUnfolded] = useState(false);
  const end = useRef<HTMLDivElement>(null);

  // A new question comes into view; its answer is followed as long as the reader is at its end.
  const brought = useRef(-1);
  const before = end.current?.getBoundingClientRect();
  const atEnd = before !== undefined && before.bottom >= 0 && before.top <= window.innerHeight + 1;
  useLayoutEffect(() => {
    if (chat && (atEnd || brought.current !== run.id)) end.current?.scrollIntoView({ block: "nearest" });
    brought.current = run.id;
  }, [run.rounds.length, run.id]);

  // An answer keeps its place, and what was opened in it, as it ends and becomes one of the messages.
  const going = (run.running || run.rounds.length > 0) && settings.messages.at(-1)?.role === "user";
  const turns: { role: string; content: string; own?: Run | undefined }[] = settings.messages.map((message, at) => ({
    ...message,
    own: message.role === "assistant" ? answers[at] : undefined,
  }));
  if (going) turns.push({ role: "assistant", content: "", own: run });
  const field = (
    <textarea
      value={chat ? settings.question : settings.prompt}
      rows={chat ? 2 : 4}
      aria-label={chat ? "Message" : "Prompt"}
      placeholder={chat ? "Ask something" : "What the model is to continue"}
      onInput={(event) => change({ [chat ? "question" : "prompt"]: event.currentTarget.value })}
    />
  );
  const buttons = (
    <div class="actions">
      {run.running ? (
        <button type="button" class="primary" onClick={stop}>
          Stop
        </button>
      ) : (
        <button type="button" class="primary" data-run aria-keyshortcuts="Control+Enter" disabled={!ready(settings)} onClick={start}>
          Run
        </button>
      )}
      <button type="button" onClick={clear} disabled={!run.rounds.length && !(chat && settings.messages.length)}>
        Clear
      </button>
      <label class="check">
        <input type="checkbox" checked={unfolded} onChange={() => setUnfolded(!unfolded)} /> show rejected tokens
      </label>
      <div class="modes" role="group" aria-label="Kind of prompt">
        {(["completion", "chat"] as const).map((mode) => (
          <button
            key={mode}
            type="button"
            aria-pressed={settings.mode === mode}
            disabled={mode === "chat" && status?.has_chat === false}
            title={mode === "chat" && status?.has_chat === false ? "the model has no chat template" : ""}
            onClick={() => settings.mode !== mode && choose(mode)}
          >
            {mode}
          </button>
        ))}
      </div>
    </div>
  );
  return (
    <div class="write">
      <Legend />
      {!chat && field}
      {!chat && buttons}
      {chat ? (
        <div class="chat">
          {turns.map(({ role, content, own }, at) => (
            <article key={at} class={role} aria-label={role} aria-busy={own?.running}>
              {own ? (
                <Output key={own.id} rounds={own.rounds} running={own.running} allUnfolded={unfolded} {...(own.id === run.id ? { onRound } : {})} />
              ) : (
                <div class="output">{content}</div>
              )}
            </article>
          ))}
          <div ref={end} />
        </div>
      ) : (
        (run.rounds.length > 0 || run.running) && (
          <article key={run.id} class="sheet" aria-label="Output" aria-busy={run.running}>
            <Output prompt={ranWith?.prompt ?? ""} rounds={run.rounds} running={run.running} allUnfolded={unfolded} onRound={onRound} />
          </article>
        )
      )}
      {run.error && (
        <p class="error" role="alert">
          {run.error}
        </p>
      )}
      {run.end && <Numbers run={run} />}
      {!run.rounds.length && !run.running && !run.error && !chat && (
        <p class="hint">
          Run it, then point at a token, or go there with the keyboard, to see how it was decided. A small number marks rejected
          draft tokens: press it to see them.
        </p>
      )}
      {chat && field}
      {chat && buttons}
    </div>
  );
}

/** What a run took. */
export function Numbers({ run }: { run: Run }) {
  const { usage, finish_reason } = run.end!;
  const { rounds, draft_tokens, accepted_tokens, mean_acceptance_length } = usage.speculation;
  const time = run.rounds.at(-1)?.time ?? 0;
  const facts: [string, string][] = [
    ["tokens", String(usage.completion_tokens)],
    ["tokens/s, recording included", time > 0 ? (usage.completion_tokens / time).toFixed(0) : "–"],
    ["target passes", String(rounds)],
    ["tokens a pass", mean_acceptance_length.toFixed(2)],
    ["accepted", draft_tokens ? `${accepted_tokens} of ${draft_tokens}` : "nothing drafted"],
    ["time", seconds(time)],
    ["ended by", finish_reason],
  ];
  return (
    <dl class="facts numbers">
      {facts.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}
