/** What the server tells; see src/foretoken/serve/page_api.py. */

export type Origin = "accepted" | "residual" | "bonus" | "target";

export interface Candidate {
  id: number;
  text: string;
  p: number;
  q: number | null;
}

/** A token of the output. `text` holds the characters that it completed, `token` is its own string. */
export interface Token {
  id: number;
  text: string;
  token: string;
  origin: Origin;
}

/** A draft token; the i-th of a round is node i + 1, node 0 the last token of the sequence. */
export interface Drafted {
  id: number;
  text: string;
  depth: number;
  accepted: boolean;
  p: number;
  q: number;
  parent: number;
  rank: number;
}

export interface Trace {
  rule: "rejection" | "greedy" | "coupled";
  verifier: string;
  stop_probs: number[];
  stop_uniform: number | null;
  next_uniform: number | null;
  node: number;
  p: number;
  rank: number;
  next_p: number;
  next_top: Candidate[];
  top: Candidate[][];
  seconds: Record<string, number>;
}

export interface Round {
  type: "round";
  round: number;
  time: number;
  tokens: Token[];
  draft?: Drafted[];
  trace?: Trace;
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  speculation: {
    rounds: number;
    drafts: number;
    draft_tokens: number;
    accepted_tokens: number;
    mean_acceptance_length: number;
    seconds: Record<string, number>;
  };
}

export interface End {
  type: "end";
  finish_reason: string;
  text: string;
  token_ids: number[];
  usage: Usage;
}

export interface Start {
  type: "start";
  prompt_tokens: number;
  max_tokens: number;
}

export type TraceEvent = Start | Round | End;

export interface Message {
  role: "system" | "user" | "assistant";
  content: string;
}

export interface Counts {
  rounds: number;
  tokens: number;
  drafted: number;
  accepted: number;
  drafted_by_position: number[];
  accepted_by_position: number[];
  mean_acceptance_length: number | null;
  draft_lengths: Record<string, number>;
}

export interface DrafterReport {
  name: string;
  trees: boolean;
  calls: [number, number][];
  acceptance: Record<"greedy" | "sampled", number[] | [number, number][]>;
}

export interface Status {
  model: string;
  version: string;
  has_chat: boolean;
  max_model_len: number;
  max_tokens: number;
  max_speculative_tokens: number;
  verifiers: string[];
  /** Those of them that take trees. */
  tree_verifiers: string[];
  drafters: string[];
  drafter: string;
  verifier: string;
  num_speculative_tokens: number | "auto";
  /** Whether the engine's drafts may branch. */
  trees: boolean;
  max_batch_size: number;
  running: number;
  waiting: number;
  cache_usage: number;
  policy: {
    plain_seconds: number | null;
    speedup: number;
    target: [number, number][];
    drafters: DrafterReport[];
  };
  window_seconds: number;
  tokens_by_second: number[];
  rounds_by_second: number[];
  recent: Counts;
  total: Counts;
}
