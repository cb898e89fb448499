import { useEffect, useState } from "preact/hooks";
import { ApiError, status as askStatus } from "./api";
import { percent, seconds } from "./format";
import { Columns, Lines, type Series } from "./plots";
import type { DrafterReport, Status } from "./types";

const EVERY = 1000; // ms

/** Live figures of the server, asked for while it is on show. `refused` is called where it wants another key. */
export function Dashboard({ refused }: { refused: () => void }) {
  const [told, setTold] = useState<Status | null>(null);
  const [error, setError] = useState("");
  useEffect(() => {
    const controller = new AbortController();
    let timer = 0;
    const ask = async () => {
      try {
        if (!document.hidden) setTold(await askStatus(controller.signal));
        setError("");
      } catch (problem) {
        if (controller.signal.aborted) return;
        setError(problem instanceof ApiError ? problem.message : "the server can't be reached");
        if (problem instanceof ApiError && problem.status === 401) refused();
      }
      timer = window.setTimeout(ask, EVERY);
    };
    ask();
    return () => {
      controller.abort();
      clearTimeout(timer);
    };
  }, []);
  if (!told) return <p class={error ? "error" : "hint"}>{error || "Asking the server …"}</p>;
  const live = told.recent.rounds > 0;
  const counts = live ? told.recent : told.total;
  const lately = told.tokens_by_second.slice(-5);
  const tiles: [string, string, string][] = [
    ["tokens/s", (lately.reduce((sum, one) => sum + one, 0) / lately.length).toFixed(0), "mean of the last 5 s"],
    ["mean acceptance length", counts.mean_acceptance_length?.toFixed(2) ?? "–", "tokens a target pass"],
    ["acceptance rate", counts.drafted ? percent(counts.accepted / counts.drafted) : "–", "of draft tokens"],
    ["running", `${told.running}`, `of ${told.max_batch_size} rows`],
    ["waiting", `${told.waiting}`, "in the queue"],
    ["against plain", `${told.policy.speedup.toFixed(2)} ×`, "of requests without a seed"],
  ];
  const positions = counts.drafted_by_position.map((drafted, at) => ({
    name: String(at + 1),
    value: drafted ? counts.accepted_by_position[at]! / drafted : 0,
    note: `${counts.accepted_by_position[at]} of ${drafted}`,
  }));
  const rounds = Math.max(counts.rounds, 1);
  const lengths = Object.entries(counts.draft_lengths).map(([name, count]) => ({
    name,
    value: count / rounds,
    note: `${count} rounds`,
  }));
  return (
    <div class="dashboard">
      {error && (
        <p class="error" role="alert">
          {error}
        </p>
      )}
      <dl class="tiles">
        {tiles.map(([name, value, note]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>
              <b>{value}</b>
              <small>{note}</small>
            </dd>
          </div>
        ))}
      </dl>
      <h2>{live ? `The last ${told.window_seconds} seconds` : counts.rounds ? "Since the server started" : "Nothing was decoded yet"}</h2>
      <div class="plots">
        <Lines
          title="Tokens by second"
          x="seconds ago"
          y="tokens"
          at={[-60, -45, -30, -15, 0]}
          series={[{ name: "", points: told.tokens_by_second.map((count, at): [number, number] => [at - told.window_seconds, count]) }]}
        />
        <Columns title="Acceptance by position" x="position in the draft" y="share accepted" top={1} format={percent} bars={positions} />
        <Columns title="Draft length chosen" x="draft tokens of a round" y="share of rounds" format={percent} bars={lengths} />
      </div>
      <h2>What the policy decides by</h2>
      <Policy policy={told.policy} />
    </div>
  );
}

function Policy({ policy }: { policy: Status["policy"] }) {
  const costs: Series[] = [
    { name: "target's pass, by positions", points: policy.target.filter(([size]) => size <= 17) },
    ...policy.drafters.filter((one) => one.calls.length).map((one) => ({ name: `${one.name}, by draft tokens`, points: one.calls })),
  ];
  const chains = policy.drafters.filter((one) => !one.trees);
  const trees = policy.drafters.filter((one) => one.trees);
  const both = (of: DrafterReport[], points: (rates: DrafterReport["acceptance"]["greedy"], one: DrafterReport) => [number, number][]): Series[] =>
    of.flatMap((one) => {
      const [sampled, greedy] = [points(one.acceptance.sampled, one), points(one.acceptance.greedy, one)];
      if (String(sampled) === String(greedy)) return [{ name: one.name, points: sampled }];
      return [
        { name: `${one.name}, sampled`, points: sampled },
        { name: `${one.name}, greedy`, points: greedy },
      ];
    });
  const costly = chains.filter((one) => one.calls.length);
  const speeds = both(costly, (rates, one) => [
    [0, 1],
    ...one.calls.map(([size, cost]) => speedup(policy.target, rates as number[], size, cost)),
  ]);
  return (
    <>
      <p class="hint">
        Costs are in plain rounds{policy.plain_seconds !== null && `: one takes ${seconds(policy.plain_seconds)}`}. Rates are of all requests so far
        but those whose seed fixes their drafts, which go by their own rounds alone.
      </p>
      <div class="plots">
        <Lines title="Costs" x="positions, or draft tokens" y="plain rounds" series={costs} />
        {chains.length > 0 && (
          <Lines
            title="Chance that a draft token is accepted"
            x="position; of copies, length of the match + position − 1"
            y="chance"
            top={1}
            format={percent}
            series={both(chains, (rates) => (rates as number[]).slice(0, 16).map((rate, at) => [at + 1, rate]))}
          />
        )}
        {trees.length > 0 && (
          <Lines title="Accepted tokens of a tree" x="nodes" y="tokens" series={both(trees, (points) => points as [number, number][])} />
        )}
        {speeds.length > 0 && <Lines title="Speed that follows, by draft length" x="draft tokens" y="× plain decoding" series={speeds} />}
      </div>
    </>
  );
}

/** (1 + expected accepted tokens) / cost of the round, the costs between measured sizes by a straight line. */
function speedup(target: [number, number][], rates: number[], size: number, draft: number): [number, number] {
  let [reach, emitted] = [1, 1];
  for (const rate of rates.slice(0, size)) {
    reach *= rate;
    emitted += reach;
  }
  const above = target.findIndex(([positions]) => positions >= size + 1);
  const [x1, y1] = target[above] ?? target.at(-1)!;
  const [x0, y0] = target[Math.max(above - 1, 0)]!;
  const pass = x1 === x0 ? y1 : y0 + ((size + 1 - x0) / (x1 - x0)) * (y1 - y0);
  return [size, emitted / (pass + draft)];
}
