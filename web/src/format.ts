import type { Drafted, Origin, Round } from "./types";

const SIGNS: Record<string, string> = { " ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍" };

/** Characters without a width, as emoji are joined with. */
const WIDTHLESS = /^[\p{Cf}\u{fe00}-\u{fe0f}]+$/u;

/** Whether a text takes no place on the screen. */
export function widthless(text: string): boolean {
  return text === "" || WIDTHLESS.test(text);
}

/** A token as a label: white space as signs, its number where its bytes are no characters, and those without a width by theirs. */
export function label(text: string, id: number): string {
  if (text === "" || text.includes("\ufffd")) return `⟨${id}⟩`;
  if (widthless(text)) return Array.from(text, (one) => `U+${one.codePointAt(0)!.toString(16).toUpperCase().padStart(4, "0")}`).join(" ");
  return text.replace(/[ \n\t\r]/g, (sign) => SIGNS[sign] ?? sign);
}

/** A probability in a few characters; what is neither 0 nor 1 is not shown as if it were. */
export function share(value: number): string {
  if (value === 0 || value === 1) return String(value);
  if (value < 0.001) return value.toExponential(1);
  if (value > 0.9995) return "> 0.999";
  return value < 0.01 ? value.toFixed(4) : value.toFixed(3);
}

export function percent(value: number): string {
  return `${Math.round(100 * value)} %`;
}

export function seconds(value: number): string {
  return value < 1 ? `${(1000 * value).toFixed(value < 0.01 ? 2 : 0)} ms` : `${value.toFixed(2)} s`;
}

export const ORIGINS: Record<Origin, string> = {
  accepted: "accepted draft token",
  residual: "replaces a rejected one",
  bonus: "bonus after a whole draft",
  target: "plain: nothing drafted",
};

export function isTree(draft: Drafted[]): boolean {
  return draft.some((token, index) => token.parent !== index);
}

/** The draft token that each of the round's accepted output tokens was, in order; all that a request's end cut off left out. */
export function acceptedNodes(round: Round): number[] {
  const draft = round.draft ?? [];
  return draft.flatMap((token, index) => (token.accepted ? [index + 1] : []));
}

/** min(1, p / q), the chance by which token-level rejection accepts a draft token. */
export function ratio(token: { p: number; q: number }): number {
  return token.q > 0 ? Math.min(1, token.p / token.q) : 1;
}

/** What a verifier draws the token after a rejection from; w is the weight of the tokens before it. */
export function residual(verifier: string): string {
  if (verifier === "token") return "residual, norm((p − q)₊)";
  return verifier === "block" ? "residual, norm((w·p − q)₊)" : "residual, what rejected tokens leave of p";
}

/** Whether a token's chance of being accepted is another one than `ratio`, to what is shown of them. */
export function differs(chance: number, token: { p: number; q: number }): boolean {
  return Math.abs(chance - ratio(token)) > 1e-3;
}

/**
 * Of a chain's node, the chance of accepting it once those before it are, and the uniform that this is compared with.
 *
 * A round draws where to stop with one uniform u: the first node whose cumulative probability of stopping exceeds u.
 * Node i is accepted if 1 - u is at most the probability of stopping there or later, tail(i). Divided by tail(i - 1)
 * that is a uniform of its own, and tail(i) / tail(i - 1) is min(1, p / q) in token-level rejection.
 */
export function coin(round: Round, node: number): { chance: number; value: number } | null {
  const trace = round.trace;
  if (!trace || trace.stop_uniform === null || isTree(round.draft ?? [])) return null;
  const tail = (from: number) => trace.stop_probs.slice(from).reduce((sum, value) => sum + value, 0);
  const before = tail(node - 1);
  if (before <= 0) return null;
  return { chance: Math.min(1, tail(node) / before), value: (1 - trace.stop_uniform) / before };
}

/** The chance, before the round's uniform is known, that a node is accepted: that the round stops at it or below it. */
export function reach(round: Round, node: number): number {
  const draft = round.draft ?? [];
  const stops = round.trace?.stop_probs ?? [];
  return stops.reduce((sum, value, at) => {
    let up = at;
    while (up > node) up = draft[up - 1]!.parent;
    return up === node ? sum + value : sum;
  }, 0);
}
