import type { Message } from "./types";

/** How a run speculates. Empty: the server's choice. */
export interface Speculation {
  drafter: string;
  verifier: string;
  /** Draft tokens a round; "auto": the policy's. */
  length: string;
  /** "none": chains, where the server's drafter grows trees. */
  tree: string;
}

/** All that a run is made of: the link holds exactly this. */
export interface Settings extends Speculation {
  mode: "completion" | "chat";
  /** What a completion goes on from. */
  prompt: string;
  /** Of a chat: what was asked and answered, and what is typed, but not asked yet. */
  messages: Message[];
  question: string;
  temperature: number;
  topP: number;
  seed: number;
  maxTokens: number;
}

/** A link leaves out what is the server's choice. */
export const SERVERS_CHOICE: Speculation = { drafter: "", verifier: "", length: "", tree: "" };

export const DEFAULTS: Settings = {
  mode: "completion",
  prompt: "def fibonacci(n):\n",
  messages: [],
  question: "",
  temperature: 0.8,
  topP: 1,
  seed: 1,
  maxTokens: 96,
  ...SERVERS_CHOICE,
};

/** What the shipped pair can write: it has memorised the form of a play. */
export const SHIPPED = { model: "tiny-pair", prompt: "KING RICHARD III:\nMy lord, the people of this city" };

export function newSeed(): number {
  return crypto.getRandomValues(new Uint32Array(1))[0]! >>> 1;
}

const SPECULATION = ["drafter", "verifier", "length", "tree"] as const;

/** What values of a link may look like; which drafters and verifiers there are, the server says. */
const SENSE = { drafter: /^./, verifier: /^./, length: /^(auto|\d{1,4})$/, tree: /^none$/ };

/** The body of a request. Messages are those up to the answer that is asked for. */
export function requestBody(
  settings: Settings,
  messages: Message[],
  detail: boolean,
  speculation: Speculation = settings,
): Record<string, unknown> {
  const { drafter, verifier, length, tree } = speculation;
  const wanted: Record<string, unknown> = {};
  if (drafter) wanted.drafter = drafter;
  if (verifier) wanted.verifier = verifier;
  if (length) wanted.num_speculative_tokens = length === "auto" ? "auto" : Number(length);
  if (tree) wanted.tree = tree;
  return {
    ...(settings.mode === "chat" ? { messages } : { prompt: settings.prompt }),
    temperature: settings.temperature,
    top_p: settings.topP,
    seed: settings.seed,
    max_tokens: settings.maxTokens,
    detail,
    speculation: wanted,
  };
}

/** What a chat asks: its messages and what is typed; with nothing typed, its messages up to the last question. */
export function asked({ messages, question }: Settings): Message[] {
  const typed = question.trim();
  if (typed) return [...messages, { role: "user", content: typed }];
  return messages.slice(0, messages.map((one) => one.role).lastIndexOf("user") + 1);
}

/** Whether there is anything to run. */
export function ready(settings: Settings): boolean {
  return settings.mode === "chat" ? asked(settings).length > 0 : settings.prompt !== "";
}

/** The fragment of a link to a run. */
export function toFragment(settings: Settings, view: string): string {
  const fields = new URLSearchParams({ view, mode: settings.mode });
  if (settings.mode === "chat") fields.set("messages", JSON.stringify(settings.messages));
  const typed = settings.mode === "chat" ? settings.question : settings.prompt;
  if (typed || settings.mode === "completion") fields.set("prompt", typed);
  fields.set("temperature", String(settings.temperature));
  fields.set("top_p", String(settings.topP));
  fields.set("seed", String(settings.seed));
  fields.set("max_tokens", String(settings.maxTokens));
  for (const name of SPECULATION) {
    if (settings[name]) fields.set(name, settings[name]);
  }
  return `#${fields}`;
}

/** What a fragment says, nothing else: fields that are missing or make no sense are left out. */
export function fromFragment(fragment: string): { settings: Partial<Settings>; view?: string } {
  const fields = new URLSearchParams(fragment.replace(/^#/, ""));
  const settings: Partial<Settings> = {};
  const number = (name: string, low: number, high: number, whole = false): number | undefined => {
    const text = fields.get(name);
    const value = text === null || text.trim() === "" ? NaN : Number(text);
    return value >= low && value <= high && (!whole || Number.isInteger(value)) ? value : undefined;
  };
  const mode = fields.get("mode");
  if (mode === "chat" || mode === "completion") settings.mode = mode;
  const prompt = fields.get("prompt");
  if (mode === "chat") settings.question = prompt ?? "";
  else if (prompt !== null) settings.prompt = prompt;
  settings.messages = readMessages(fields.get("messages"));
  settings.temperature = number("temperature", 0, 10);
  settings.topP = number("top_p", Number.MIN_VALUE, 1);
  settings.seed = number("seed", 0, Number.MAX_SAFE_INTEGER, true);
  settings.maxTokens = number("max_tokens", 1, 1e6, true);
  for (const name of SPECULATION) {
    const value = fields.get(name);
    if (value !== null && SENSE[name].test(value)) settings[name] = value;
  }
  for (const name of Object.keys(settings) as (keyof Settings)[]) {
    if (settings[name] === undefined) delete settings[name];
  }
  const view = fields.get("view");
  return view === null ? { settings } : { settings, view };
}

function readMessages(text: string | null): Message[] | undefined {
  if (text === null) return undefined;
  try {
    const given: unknown = JSON.parse(text);
    if (!Array.isArray(given)) return undefined;
    return given
      .filter((one) => ["system", "user", "assistant"].includes(one?.role) && typeof one?.content === "string")
      .map(({ role, content }) => ({ role, content }));
  } catch {
    return undefined;
  }
}
