import { useCallback, useRef, useState } from "preact/hooks";
import { trace } from "./api";
import type { End, Round, Start } from "./types";

export interface Run {
  /** Which one it is of those on this page; 0: none yet. */
  id: number;
  rounds: Round[];
  start?: Start;
  end?: End;
  error?: string;
  running: boolean;
}

export const EMPTY: Run = { id: 0, rounds: [], running: false };

export function textOf(rounds: Round[]): string {
  return rounds.flatMap((round) => round.tokens.map((token) => token.text)).join("");
}

/**
 * One request at a time, its rounds as state; they are shown at most once a frame. `begin` gives the run as it ended,
 * or null if another one or nothing has taken its place.
 */
export function useRun(): { run: Run; begin: (body: Record<string, unknown>) => Promise<Run | null>; stop: () => void; clear: () => void } {
  const [run, setRun] = useState<Run>(EMPTY);
  const controller = useRef<AbortController | null>(null);
  const count = useRef(0);

  const begin = useCallback(async (body: Record<string, unknown>) => {
    controller.current?.abort();
    const own = (controller.current = new AbortController());
    let now: Run = { id: ++count.current, rounds: [], running: true };
    let frame = 0;
    const show = () => {
      frame = 0;
      if (controller.current === own) setRun(now);
    };
    setRun(now);
    try {
      await trace(
        body,
        (event) => {
          if (event.type === "start") now = { ...now, start: event };
          else if (event.type === "end") now = { ...now, end: event };
          else now = { ...now, rounds: [...now.rounds, event] };
          frame ||= requestAnimationFrame(show);
        },
        own.signal,
      );
    } catch (error) {
      if (!own.signal.aborted) now = { ...now, error: error instanceof Error ? error.message : String(error) };
    }
    cancelAnimationFrame(frame);
    now = { ...now, running: false };
    show();
    return controller.current === own ? now : null;
  }, []);

  const stop = useCallback(() => controller.current?.abort(), []);
  const clear = useCallback(() => {
    controller.current?.abort();
    controller.current = null;
    setRun(EMPTY);
  }, []);
  return { run, begin, stop, clear };
}
