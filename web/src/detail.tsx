import type { ComponentChildren } from "preact";
import { acceptedNodes, coin, differs, isTree, label, ORIGINS, ratio, reach, residual, share } from "./format";
import type { Candidate, Drafted, Round } from "./types";

/** A token of the output, or of a draft. */
export interface Place {
  kind: "token" | "draft";
  round: number;
  index: number;
}

/** How one token was decided. */
export function Detail({ round, place }: { round: Round; place: Place }) {
  const accepted = place.kind === "token" ? acceptedNodes(round)[place.index] : place.index + 1;
  const token = place.kind === "token" ? round.tokens[place.index] : undefined;
  if (token ? token.origin === "accepted" && accepted : accepted) return <DraftDetail round={round} node={accepted!} />;
  if (!token) return null;
  const trace = round.trace;
  const replaced = token.origin === "residual";
  // Of a chain, the token that was rejected; of a tree there may be several.
  const instead = replaced && trace ? (round.draft ?? []).filter((one) => one.parent === trace.node) : [];
  const note = instead.length === 1 ? `instead of “${label(instead[0]!.text, instead[0]!.id)}”, which was rejected` : ORIGINS[token.origin];
  return (
    <Card title={label(token.token, token.id)} kind={token.origin} note={note}>
      {trace && (
        <>
          <Facts
            facts={[
              ["p", share(trace.p)],
              ["rank in p", String(trace.rank)],
              trace.next_uniform !== null && ["uniform", share(trace.next_uniform)],
              ["round", String(round.round)],
            ]}
          />
          <Bars
            title={trace.rule === "rejection" && replaced ? `Drawn from the ${residual(trace.verifier)}` : topTitle(trace.rule)}
            candidates={trace.next_top}
            chosen={token.id}
            also={{ id: token.id, text: token.token, p: trace.next_p, q: null }}
          />
        </>
      )}
    </Card>
  );
}

function topTitle(rule: string): string {
  return rule === "greedy" ? "The model's probabilities; the highest is taken" : rule === "coupled" ? "p; the target picks with the seed's noise" : "Drawn from p";
}

export function DraftDetail({ round, node }: { round: Round; node: number }) {
  const token = round.draft![node - 1]!;
  const trace = round.trace!;
  const own = coin(round, node);
  const facts: ([string, string] | false)[] = [
    ["p", share(token.p)],
    ["q", share(token.q)],
    ["min(1, p/q)", share(ratio(token))],
    own !== null && own.chance > 0 && differs(own.chance, token) && ["chance here", share(own.chance)],
    own !== null && own.value <= 1 && ["uniform", share(own.value)],
    trace.rule === "rejection" && isTree(round.draft!) && ["chance to get here", share(reach(round, node))],
    ["rank in p", String(token.rank)],
    ["round", String(round.round)],
  ];
  let why = "";
  if (trace.rule === "rejection" && own) {
    if (own.value > 1) why = "A token before it was rejected, and so was all that followed.";
    else why = token.accepted ? "Accepted: the uniform is at most the chance." : "Rejected: the uniform is above the chance.";
  } else if (trace.rule !== "rejection") {
    why = token.accepted ? "Accepted: it is what the target itself picks." : "Rejected: the target itself picks another token.";
  }
  const top = trace.top[token.parent];
  const drawn = top?.some((one) => one.q !== null);
  return (
    <Card
      title={label(token.text, token.id)}
      kind={token.accepted ? "accepted" : "rejected"}
      note={token.accepted ? ORIGINS.accepted : "rejected draft token"}
    >
      <Facts facts={facts} />
      {why && <p class="why">{why}</p>}
      {top && <Bars title={trace.rule === "greedy" ? "Model's probabilities here" : drawn ? "p here; the line is q" : "p here"} candidates={top} chosen={token.id} {...alsoOf(round, token)} />}
    </Card>
  );
}

/** A draft token as a candidate; not of greedy requests, whose candidates are the model's own probabilities. */
export function alsoOf(round: Round, token: Drafted): { also?: Candidate } {
  const drawn = round.trace!.top[token.parent]?.some((one) => one.q !== null);
  return round.trace!.rule === "greedy" ? {} : { also: { id: token.id, text: token.text, p: token.p, q: drawn ? token.q : null } };
}

function Card({ title, kind, note, children }: { title: string; kind: string; note: string; children?: ComponentChildren }) {
  return (
    <div class="detail">
      <header>
        <b class={`token ${kind}`}>{title}</b>
        <span>{note}</span>
      </header>
      {children}
    </div>
  );
}

function Facts({ facts }: { facts: ([string, string] | false)[] }) {
  return (
    <dl class="facts">
      {facts.map(
        (fact) =>
          fact && (
            <div key={fact[0]}>
              <dt>{fact[0]}</dt>
              <dd>{fact[1]}</dd>
            </div>
          ),
      )}
    </dl>
  );
}

interface BarsProps {
  title: string;
  candidates: Candidate[];
  chosen?: number;
  /** The token that it is about, where it need not be among the most probable ones. */
  also?: Candidate;
}

/** The most probable tokens of a distribution; the one that was taken is marked. */
export function Bars({ title, candidates: given, chosen, also }: BarsProps) {
  const candidates = also && !given.some((one) => one.id === also.id) ? [...given, also] : given;
  const most = Math.max(...candidates.map((one) => Math.max(one.p, one.q ?? 0)), 1e-9);
  return (
    <div class="bars">
      <h4>{title}</h4>
      <table>
        <tbody>
          {candidates.map((one) => (
            <tr key={one.id} class={one.id === chosen ? "chosen" : ""}>
              <th scope="row">{label(one.text, one.id)}</th>
              <td class="bar">
                <svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">
                  <rect class="p" width={(100 * one.p) / most} height="10" rx="1" />
                  {one.q !== null && <rect class="q" x={Math.max(0, (100 * one.q) / most - 0.8)} width="1.6" height="10" />}
                </svg>
              </td>
              <td class="number">{share(one.p)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
