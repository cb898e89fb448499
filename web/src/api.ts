import { keep, kept } from "./storage";
import type { Status, TraceEvent } from "./types";

const KEY = "foretoken-api-key";

/** The server refused: what it said, and whether it wants another key. */
export class ApiError extends Error {
  constructor(
    message: string,
    readonly status: number,
  ) {
    super(message);
  }
}

export function setKey(key: string): void {
  keep("sessionStorage", KEY, key);
}

export function hasKey(): boolean {
  return !!kept("sessionStorage", KEY);
}

function headers(): Record<string, string> {
  const key = kept("sessionStorage", KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function refuse(response: Response): Promise<never> {
  let message = `the server answered with status ${response.status}`;
  try {
    const { error } = await response.json();
    message = (typeof error === "string" ? error : error.message) || message; // proxies have forms of their own
  } catch {
    // no JSON: the status has to do
  }
  throw new ApiError(message, response.status);
}

export async function status(signal?: AbortSignal): Promise<Status> {
  const response = await fetch("v1/foretoken/status", { headers: headers(), signal: signal ?? null });
  return response.ok ? await response.json() : refuse(response);
}

/** Decode one request, and hand over its events as they come. Throws what the server says went wrong. */
export async function trace(
  body: Record<string, unknown>,
  onEvent: (event: TraceEvent) => void,
  signal: AbortSignal,
): Promise<void> {
  const lost = (message: string) => () => {
    throw new ApiError(message, 0); // browsers have words of their own, which say less
  };
  const response = await fetch("v1/foretoken/trace", {
    method: "POST",
    headers: { "content-type": "application/json", ...headers() },
    body: JSON.stringify(body),
    signal,
  }).catch(lost("the server can't be reached"));
  if (!response.ok || !response.body) return refuse(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { done, value } = await reader.read().catch(lost("the server broke off"));
    if (done) throw new ApiError("the server broke off", 0);
    const events = (waiting + value).split("\n\n");
    waiting = events.pop() ?? "";
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const told = JSON.parse(data);
      if (told.error) throw new ApiError(told.error.message, 0);
      onEvent(told);
    }
  }
}
