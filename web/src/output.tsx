import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { Detail, type Place } from "./detail";
import { isTree, label, ORIGINS } from "./format";
import { Tree } from "./tree";
import type { Round } from "./types";

const REJECTED = "rejected";

/** Of each round, its output tokens and, where they were rejected, its other draft tokens, in the order in which they are read. */
function places(rounds: Round[], unfolded: (round: number) => boolean): Place[][] {
  return rounds.map((round, at) => {
    const last = round.tokens.length - 1;
    return round.tokens.flatMap((token, index): Place[] => {
      const own: Place = { kind: "token", round: at, index };
      if (index !== last || !unfolded(at) || isTree(round.draft ?? [])) return [own];
      const rejected = (round.draft ?? []).flatMap((one, i): Place[] =>
        one.accepted ? [] : [{ kind: "draft", round: at, index: i }],
      );
      return token.origin === "accepted" ? [own, ...rejected] : [...rejected, own]; // the request may end inside a draft
    });
  });
}

interface Props {
  rounds: Round[];
  prompt?: string;
  running: boolean;
  allUnfolded: boolean;
  onRound?: (round: number) => void;
}

/** The output, every token coloured by where it came from. Arrow keys go from token to token. */
export function Output({ rounds, prompt, running, allUnfolded, onRound }: Props) {
  const [toggled, setToggled] = useState<ReadonlySet<number>>(new Set());
  const [active, setActive] = useState<Place | null>(null);
  const box = useRef<HTMLDivElement>(null);
  const unfolded = (round: number) => allUnfolded !== toggled.has(round);
  const byRound = places(rounds, unfolded);
  const list = byRound.flat();
  const name = (place: Place) => `${place.round}-${place.kind}-${place.index}`;
  const shown = active && list.some((place) => name(place) === name(active)) ? active : null;
  const stop = name(shown ?? list[0] ?? { kind: "token", round: 0, index: 0 });

  const toggle = (round: number) => {
    const next = new Set(toggled);
    if (!next.delete(round)) next.add(round);
    setToggled(next);
    setActive(null);
  };

  const move = (event: KeyboardEvent, place: Place) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const at = list.findIndex((one) => name(one) === name(place));
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: list.length - 1 }[event.key];
    if (event.key === "Escape" && shown) {
      event.stopPropagation(); // one press closes this alone
      setActive(null);
    } else if (event.key === "Enter") onRound?.(place.round);
    else if (next !== undefined && list[next]) {
      event.preventDefault();
      box.current?.querySelector<HTMLElement>(`[data-place="${name(list[next])}"]`)?.focus();
    }
  };

  const token = (place: Place) => {
    const round = rounds[place.round]!;
    const one = place.kind === "token" ? round.tokens[place.index]! : round.draft![place.index]!;
    const kind = "origin" in one ? one.origin : REJECTED;
    const text = "token" in one ? one.text : one.text || label(one.text, one.id);
    const shown = "token" in one ? label(one.token, one.id) : label(one.text, one.id);
    return (
      <span
        key={name(place)}
        class={`token ${kind}`}
        role="button"
        tabIndex={name(place) === stop ? 0 : -1}
        data-place={name(place)}
        aria-label={`${shown}, ${kind === REJECTED ? "rejected draft token" : ORIGINS[kind as keyof typeof ORIGINS]}`}
        onMouseEnter={() => setActive(place)}
        onFocus={() => setActive(place)}
        onBlur={() => setActive(null)}
        onKeyDown={(event) => move(event, place)}
        onClick={(event) => event.currentTarget.focus()}
        onDblClick={() => onRound?.(place.round)}
      >
        {kind === REJECTED ? text.replaceAll("\n", "⏎") : text.includes("\n") ? <NewLines text={text} /> : text || <i class="part">·</i>}
      </span>
    );
  };

  return (
    <div class="output" ref={box} onMouseLeave={() => active && !box.current?.contains(document.activeElement) && setActive(null)}>
      {prompt !== undefined && <span class="prompt">{prompt}</span>}
      {rounds.map((round, at) => {
        const own = byRound[at]!;
        const rejected = (round.draft ?? []).filter((one) => !one.accepted).length;
        const split = own.findIndex((place) => place.kind === "draft" || round.tokens[place.index]?.origin !== "accepted");
        const cut = split < 0 ? own.length : split;
        const tree = unfolded(at) && isTree(round.draft ?? []);
        return (
          <span key={at}>
            {own.slice(0, cut).map(token)}
            {rejected > 0 && (
              <button
                type="button"
                class="fold"
                aria-expanded={unfolded(at)}
                aria-label={`${rejected} rejected draft tokens of round ${round.round}`}
                onClick={() => toggle(at)}
              >
                {rejected}
              </button>
            )}
            {tree && (
              <span class="inline-tree">
                <Tree round={round} />
              </span>
            )}
            {own.slice(cut).map(token)}
          </span>
        );
      })}
      {running && <span class="caret" aria-hidden="true" />}
      {shown && <Popover anchor={name(shown)} box={box} round={rounds[shown.round]!} place={shown} />}
    </div>
  );
}

function NewLines({ text }: { text: string }) {
  const parts = text.split("\n");
  return (
    <>
      {parts.map((part, at) => (
        <span key={at}>
          {at > 0 && (
            <>
              <i class="sign" aria-hidden="true">
                ⏎
              </i>
              {"\n"}
            </>
          )}
          {part}
        </span>
      ))}
    </>
  );
}

interface PopoverProps {
  anchor: string;
  box: { current: HTMLDivElement | null };
  round: Round;
  place: Place;
}

function Popover({ anchor, box, round, place }: PopoverProps) {
  const own = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    const token = box.current?.querySelector<HTMLElement>(`[data-place="${anchor}"]`);
    const card = own.current;
    if (!token || !card || !box.current) return;
    const outer = box.current.getBoundingClientRect();
    const rects = token.getClientRects();
    const rect = rects[0] ?? token.getBoundingClientRect();
    const left = Math.min(Math.max(rect.left - outer.left, 0), Math.max(outer.width - card.offsetWidth, 0));
    const below = rect.bottom + card.offsetHeight + 12 < window.innerHeight || rect.top < card.offsetHeight + 12;
    const top = below ? rect.bottom - outer.top + 6 : rect.top - outer.top - card.offsetHeight - 6;
    card.style.left = `${left}px`;
    card.style.top = `${top + box.current.scrollTop}px`;
  });
  return (
    <div class="popover" ref={own} role="status">
      <Detail round={round} place={place} />
    </div>
  );
}

/** What the colours mean. */
export function Legend() {
  const entries: [string, string][] = [
    ["accepted", "accepted"],
    ["residual", "replaces a rejected one"],
    ["bonus", "bonus after a whole draft"],
    ["target", "plain"],
    [REJECTED, "rejected: press the number to see it"],
  ];
  return (
    <ul class="legend" aria-label="Colours of tokens">
      {entries.map(([kind, text]) => (
        <li key={kind}>
          <span class={`token ${kind}`} aria-hidden="true">
            Aa
          </span>
          {text}
        </li>
      ))}
    </ul>
  );
}
