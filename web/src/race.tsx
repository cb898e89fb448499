import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { trace } from "./api";
import { percent, seconds } from "./format";
import { Icon } from "./icon";
import { SpeculationFields } from "./panel";
import { asked, ready, requestBody, SERVERS_CHOICE, type Settings, type Speculation } from "./settings";
import type { Round, Status } from "./types";

const RUNS = 3;
const ENOUGH = 10; // seconds of one turn of all lanes after which there is no second one
const SHORTEST = 4; // seconds that the slowest lane is shown for

interface Lane extends Speculation {
  plain: boolean;
}

interface Result {
  rounds: Round[];
  tokens: number[];
  /** Seconds from the request to its last token, of every turn; `rounds` are of the median one. */
  times: number[];
  time: number;
}

/** What of a race outlives a look at another view. */
export interface RaceState {
  /** The lanes beside the plain one, once they are chosen. */
  chosen: Lane[] | null;
  measured: { subject: string; results: Result[] } | null;
}

export const NO_RACE: RaceState = { chosen: null, measured: null };

const PLAIN: Lane = { ...SERVERS_CHOICE, plain: true, length: "0" };

interface Props {
  settings: Settings;
  status: Status | null;
  race: RaceState;
  setRace: (change: (old: RaceState) => RaceState) => void;
  settle: () => Promise<void>;
  /** Called as a race of these settings begins. */
  begins: () => void;
  /** Called after an error of the server's: it may be another one, or want another key. */
  failed: () => void;
}

/**
 * The same prompt and seed in several lanes. They are measured one after another, turn by turn, so that neither slows
 * the other, and shown beside each other. `settle` stops another run, and waits until what became of it is in the settings.
 */
export function Race({ settings, status, race, setRace, settle, begins, failed }: Props) {
  const { chosen, measured } = race;
  const setOthers = (lanes: Lane[]) => setRace((old) => ({ ...old, chosen: lanes }));
  const setMeasured = (found: RaceState["measured"]) => setRace((old) => ({ ...old, measured: found }));
  const [note, setNote] = useState("");
  const [error, setError] = useState("");
  const [clock, setClock] = useState<number | null>(measured && Infinity); // seconds of the race on show; null before it
  const controller = useRef<AbortController | null>(null);
  const length = settings.length === "0" ? "" : settings.length;
  const own = { plain: false, verifier: settings.verifier, length, tree: settings.tree };
  // Two drafters beside each other, where the server has them: until lanes are changed, they follow the settings.
  const several = status && status.drafters.length > 2 && !settings.drafter ? status.drafters.slice(1, 3) : [settings.drafter];
  const others: Lane[] = chosen ?? several.map((drafter) => ({ ...own, drafter }));
  const lanes = [PLAIN, ...others];

  const messages = asked(settings);
  // Plain decoding draws as the others do where the outputs are to be equal.
  const plain = { ...PLAIN, verifier: others.every((other) => coupled(other, status)) ? "coupled" : "" };
  const bodies = [plain, ...others].map((lane) => requestBody(settings, messages, false, lane));
  // Results are on show only while lanes and settings ask for what was measured.
  const subject = JSON.stringify(bodies);
  const results = measured?.subject === subject ? measured.results : [];
  useEffect(() => {
    setNote("");
    return () => controller.current?.abort();
  }, [subject]);

  const one = async (body: Record<string, unknown>, signal: AbortSignal): Promise<{ rounds: Round[]; tokens: number[]; time: number }> => {
    const rounds: Round[] = [];
    let tokens: number[] = [];
    await trace(body, (event) => {
      if (event.type === "round") rounds.push(event);
      else if (event.type === "end") tokens = event.token_ids;
    }, signal);
    return { rounds, tokens, time: rounds.at(-1)?.time ?? 0 };
  };

  // A run that is stopped may change the settings, and with them what is raced: the race begins behind that change.
  const [begun, setBegun] = useState(0);
  const start = async () => {
    await settle();
    setBegun((old) => old + 1);
  };
  useEffect(() => {
    if (begun) void measure();
  }, [begun]);
  const measure = async () => {
    begins();
    controller.current?.abort();
    const own = (controller.current = new AbortController());
    setError("");
    setMeasured(null);
    setClock(null);
    try {
      setNote("Warming up …");
      for (const body of bodies) await one({ ...body, max_tokens: Math.min(8, settings.maxTokens) }, own.signal);
      const turns: Awaited<ReturnType<typeof one>>[][] = lanes.map(() => []);
      let total = 0;
      for (let turn = 0; turn < RUNS && (turn === 0 || total < ENOUGH); turn++) {
        for (const [at, lane] of lanes.entries()) {
          setNote(`Measuring ${name(lane, status)}, turn ${turn + 1} of ${RUNS} …`);
          const result = await one(bodies[at]!, own.signal);
          turns[at]!.push(result);
          total += result.time;
        }
      }
      setNote("");
      const found = turns.map((runs) => {
        const sorted = [...runs].sort((a, b) => a.time - b.time);
        const median = sorted[(sorted.length - 1) >> 1]!;
        return { ...median, times: sorted.map((run) => run.time) };
      });
      setMeasured({ subject, results: found });
      replay(found);
    } catch (problem) {
      if (controller.current === own) setNote("");
      if (own.signal.aborted) return;
      setError(problem instanceof Error ? problem.message : String(problem));
      failed();
    }
  };

  const frame = useRef(0);
  useEffect(() => () => cancelAnimationFrame(frame.current), []);
  const slowest = (of: Result[]) => Math.max(...of.map((result) => result.time), 1e-6);
  const slowed = (of: Result[]) => Math.max(1, SHORTEST / slowest(of));
  const replay = (of: Result[]) => {
    cancelAnimationFrame(frame.current);
    const until = slowest(of);
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) {
      setClock(until);
      return;
    }
    const began = performance.now();
    const tick = () => {
      const now = (performance.now() - began) / 1000 / slowed(of);
      setClock(Math.min(now, until));
      if (now < until) frame.current = requestAnimationFrame(tick);
    };
    tick();
  };

  const done = clock !== null && results.length > 0 && clock >= slowest(results);
  const changeLane = (at: number, part: Partial<Speculation>) => setOthers(others.map((lane, i) => (i === at ? { ...lane, ...part } : lane)));
  return (
    <div class="race">
      <p class="explain">
        The same prompt and seed, plain and speculative. Lanes are measured one after another, so that none slows another, and then
        shown together.
      </p>
      <blockquote class="output prompt">{settings.mode === "chat" ? (messages.at(-1)?.content ?? "") : settings.prompt}</blockquote>
      <div class="actions">
        {note ? (
          <button type="button" class="primary" data-stop onClick={() => { controller.current?.abort(); setNote(""); }}>
            Stop
          </button>
        ) : (
          <button type="button" class="primary" data-run disabled={!ready(settings)} onClick={start}>
            Start
          </button>
        )}
        <button type="button" disabled={!results.length || !!note} onClick={() => replay(results)}>
          Show again
        </button>
        <button type="button" disabled={others.length >= 3 || !!note} onClick={() => setOthers([...others, others[0]!])}>
          Add a lane
        </button>
        <span role="status">{note || (results.length && clock !== null && slowed(results) > 1.05 ? `shown ${slowed(results).toFixed(1)} × slower than it was` : "")}</span>
      </div>
      {error && (
        <p class="error" role="alert">
          {error}
        </p>
      )}
      <div class="lanes">
        {lanes.map((lane, at) => (
          <section key={at} class="lane" aria-label={name(lane, status)}>
            <header>
              <h3>{lane.plain ? "Plain" : name(lane, status)}</h3>
              {at > 1 && !note && (
                <button type="button" aria-label="Remove this lane" onClick={() => setOthers(others.filter((_, i) => i !== at - 1))}>
                  <Icon name="close" />
                </button>
              )}
            </header>
            {lane.plain ? (
              <p class="hint">The target alone: one token a pass.</p>
            ) : (
              <fieldset class="lane-fields" disabled={!!note}>
                <SpeculationFields value={lane} status={status} change={(part) => changeLane(at - 1, part)} />
              </fieldset>
            )}
            {results[at] && clock !== null && <LaneView result={results[at]} plain={results[0]!} clock={clock} isPlain={lane.plain} />}
          </section>
        ))}
      </div>
      {done && <Verdict lanes={lanes} results={results} settings={settings} status={status} />}
    </div>
  );
}

function coupled(lane: Lane, status: Status | null): boolean {
  return (lane.verifier || status?.verifier) === "coupled";
}

function name(lane: Lane, status: Status | null): string {
  if (lane.plain) return "plain decoding";
  const parts = [lane.drafter || status?.drafter || "speculation"];
  const length = lane.length || String(status?.num_speculative_tokens ?? "");
  if (length) parts.push(length === "auto" ? "length auto" : `length ${length}`);
  if (lane.tree && status?.trees) parts.push("chains");
  if (lane.verifier) parts.push(lane.verifier);
  return parts.join(", ");
}

function LaneView({ result, plain, clock, isPlain }: { result: Result; plain: Result; clock: number; isPlain: boolean }) {
  const shown = result.rounds.filter((round) => round.time <= clock);
  const tokens = shown.reduce((sum, round) => sum + round.tokens.length, 0);
  const over = clock >= result.time;
  const most = result.tokens.length || 1;
  const time = Math.min(clock, result.time);
  // What comes is followed; what is shown whole begins at its beginning.
  const box = useRef<HTMLDivElement>(null);
  const follows = useRef(false);
  follows.current ||= !over;
  useLayoutEffect(() => {
    if (follows.current) box.current!.scrollTop = box.current!.scrollHeight;
  }, [tokens]);
  return (
    <>
      <svg class={`progress ${over ? "over" : ""}`} viewBox="0 0 100 4" preserveAspectRatio="none" aria-hidden="true">
        <rect class="rest" width="100" height="4" />
        <rect class="own" width={(100 * tokens) / most} height="4" />
      </svg>
      <dl class="facts">
        <div>
          <dt>tokens</dt>
          <dd>{tokens}</dd>
        </div>
        <div>
          <dt>time</dt>
          <dd>{seconds(time)}</dd>
        </div>
        <div>
          <dt>tokens/s</dt>
          <dd>{over ? (most / result.time).toFixed(0) : time > 0 ? (tokens / time).toFixed(0) : "–"}</dd>
        </div>
        {over && !isPlain && (
          <div class={speed(result) > speed(plain) ? "gain" : ""}>
            <dt>against plain</dt>
            <dd>{(speed(result) / speed(plain)).toFixed(2)} ×</dd>
          </div>
        )}
      </dl>
      <div class="output" ref={box} tabIndex={0} aria-label="Output">
        {shown.map((round) =>
          round.tokens.map((token, at) => (
            <span key={`${round.round}-${at}`} class={`token ${token.origin}`}>
              {token.text}
            </span>
          )),
        )}
        {!over && <span class="caret" aria-hidden="true" />}
      </div>
    </>
  );
}

function speed(result: Result): number {
  return result.tokens.length / result.time;
}

/** What the race showed, equality of outputs included where it is promised. */
function Verdict({ lanes, results, settings, status }: { lanes: Lane[]; results: Result[]; settings: Settings; status: Status | null }) {
  const plain = results[0]!;
  return (
    <div class="verdict" role="status">
      {lanes.slice(1).map((lane, at) => {
        const own = results[at + 1]!;
        const differs = own.tokens.findIndex((token, i) => token !== plain.tokens[i]);
        const equal = differs < 0 && own.tokens.length === plain.tokens.length;
        const promised = settings.temperature === 0 || lanes.slice(1).every((other) => coupled(other, status));
        const saved = 1 - speed(plain) / speed(own);
        return (
          <p key={at}>
            <b>{name(lane, status)}</b>: {(speed(own) / speed(plain)).toFixed(2)} × the speed of plain decoding,{" "}
            {saved >= 0 ? `${percent(saved)} of the time saved` : `${percent(-saved)} more time taken`}. Median of {own.times.length}:{" "}
            {own.times.map((time) => seconds(time)).join(", ")}; plain {plain.times.map((time) => seconds(time)).join(", ")}.{" "}
            {promised ? (
              equal ? (
                <span class="equal">Outputs are equal: checked token by token, {own.tokens.length} of {plain.tokens.length}.</span>
              ) : (
                <span class="unequal">
                  Outputs differ from token {differs < 0 ? Math.min(own.tokens.length, plain.tokens.length) + 1 : differs + 1} on: a near tie that
                  rounding decided.
                </span>
              )
            ) : (
              <span>
                Both are exact samples from the target's distribution; at temperature {settings.temperature} with this verifier they need not be
                the same one. With verifier coupled, or at temperature 0, they are.
              </span>
            )}
          </p>
        );
      })}
    </div>
  );
}
