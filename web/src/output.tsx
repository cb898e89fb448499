import { Component } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { Detail, type Place } from "./detail";
import { isTree, label, ORIGINS, widthless } from "./format";
import { Tree } from "./tree";
import type { Round } from "./types";

const REJECTED = "rejected";

/** The output tokens of a round and, where they are unfolded, its rejected draft tokens, in the order in which they are read. */
function places(round: Round, at: number, unfolded: boolean): Place[] {
  const last = round.tokens.length - 1;
  return round.tokens.flatMap((token, index): Place[] => {
    const own: Place = { kind: "token", round: at, index };
    if (index !== last || !unfolded || isTree(round.draft ?? [])) return [own];
    const rejected = (round.draft ?? []).flatMap((one, i): Place[] => (one.accepted ? [] : [{ kind: "draft", round: at, index: i }]));
    return token.origin === "accepted" ? [own, ...rejected] : [...rejected, own]; // the request may end inside a draft
  });
}

function name(place: Place): string {
  return `${place.round}-${place.kind}-${place.index}`;
}

interface Props {
  rounds: Round[];
  prompt?: string;
  running: boolean;
  allUnfolded: boolean;
  onRound?: (round: number) => void;
}

/** What can be done with a token, or with the rejected ones of a round. */
interface Acts {
  look: (place: Place | null) => void;
  walk: (event: KeyboardEvent) => void;
  press: (event: KeyboardEvent, place: Place) => void;
  open: (round: number) => void;
  toggle: (round: number) => void;
}

/** The output, every token coloured by where it came from. Tab comes to it once; arrow keys go from token to token. */
export function Output({ rounds, prompt, running, allUnfolded, onRound }: Props) {
  const [toggled, setToggled] = useState<ReadonlySet<number>>(new Set());
  const [active, setActive] = useState<Place | null>(null);
  const box = useRef<HTMLDivElement>(null);
  const unfolded = (round: number) => allUnfolded !== toggled.has(round);
  const list = rounds.flatMap((round, at) => places(round, at, unfolded(at)));
  const shown = active && list.some((place) => name(place) === name(active)) ? active : null;
  const stop = shown ?? list[0];

  const toggle = (round: number) => {
    const next = new Set(toggled);
    if (!next.delete(round)) next.add(round);
    setToggled(next);
    setActive(null);
  };

  const walk = (event: KeyboardEvent) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const all = Array.from(box.current!.querySelectorAll<HTMLElement>("[data-place], .fold"));
    const tokens = all.filter((one) => one.dataset.place);
    const at = all.indexOf(event.currentTarget as HTMLElement);
    const next = { ArrowRight: all[at + 1], ArrowLeft: all[at - 1], Home: tokens[0], End: tokens.at(-1) }[event.key];
    if (!next) return;
    event.preventDefault();
    next.focus();
  };

  const press = (event: KeyboardEvent, place: Place) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape" && shown) {
      event.stopPropagation(); // one press closes this alone
      setActive(null);
    } else if (event.key === "Enter") onRound?.(place.round);
    else walk(event);
  };

  // The same object at all times: rounds keep it, and are drawn again only where they change.
  const acts = useRef({} as Acts).current;
  Object.assign(acts, { look: setActive, walk, press, open: (round: number) => onRound?.(round), toggle });
  return (
    <div class="output" ref={box} onMouseLeave={() => active && !box.current?.contains(document.activeElement) && setActive(null)}>
      {prompt !== undefined && <span class="prompt">{prompt}</span>}
      {rounds.map((round, at) => (
        <RoundView key={at} round={round} at={at} unfolded={unfolded(at)} stop={stop?.round === at ? name(stop) : ""} acts={acts} />
      ))}
      {running && <span class="caret" aria-hidden="true" />}
      {shown && <Popover anchor={name(shown)} box={box} round={rounds[shown.round]!} place={shown} />}
    </div>
  );
}

interface RoundProps {
  round: Round;
  at: number;
  unfolded: boolean;
  /** The place that Tab comes to; empty where it is in another round. */
  stop: string;
  acts: Acts;
}

/** The tokens of one round. An output has up to thousands, and one of them changes at a time. */
class RoundView extends Component<RoundProps> {
  override shouldComponentUpdate(next: RoundProps): boolean {
    return (Object.keys(next) as (keyof RoundProps)[]).some((one) => next[one] !== this.props[one]);
  }

  override render({ round, at, unfolded, stop, acts }: RoundProps) {
    const own = places(round, at, unfolded);
    const draft = round.draft ?? [];
    const rejected = draft.filter((one) => !one.accepted).length;
    const split = own.findIndex((place) => place.kind === "draft" || round.tokens[place.index]?.origin !== "accepted");
    const cut = split < 0 ? own.length : split;
    const token = (place: Place) => <TokenView key={name(place)} round={round} place={place} stop={name(place) === stop} acts={acts} />;
    return (
      <span>
        {own.slice(0, cut).map(token)}
        {rejected > 0 && (
          <button
            type="button"
            class="fold"
            aria-expanded={unfolded}
            aria-label={`${rejected} rejected draft ${rejected === 1 ? "token" : "tokens"} of round ${round.round}`}
            tabIndex={-1}
            onKeyDown={acts.walk}
            onClick={() => acts.toggle(at)}
          >
            {rejected}
          </button>
        )}
        {unfolded && isTree(draft) && (
          <span class="inline-tree">
            <Tree round={round} />
          </span>
        )}
        {own.slice(cut).map(token)}
      </span>
    );
  }
}

function TokenView({ round, place, stop, acts }: { round: Round; place: Place; stop: boolean; acts: Acts }) {
  const one = place.kind === "token" ? round.tokens[place.index]! : round.draft![place.index]!;
  const kind = "origin" in one ? one.origin : REJECTED;
  const text = "token" in one ? one.text : one.text || label(one.text, one.id);
  const shown = "token" in one ? label(one.token, one.id) : label(one.text, one.id);
  return (
    <span
      class={`token ${kind}`}
      role="button"
      tabIndex={stop ? 0 : -1}
      data-place={name(place)}
      aria-label={`${shown}, ${kind === REJECTED ? "rejected draft token" : ORIGINS[kind as keyof typeof ORIGINS]}`}
      onMouseEnter={() => acts.look(place)}
      onFocus={() => acts.look(place)}
      onBlur={() => acts.look(null)}
      onKeyDown={(event) => acts.press(event, place)}
      onClick={(event) => event.currentTarget.focus()}
      onDblClick={() => acts.open(place.round)}
    >
      {kind === REJECTED ? text.replaceAll("\n", "⏎") : text.includes("\n") ? <NewLines text={text} /> : text}
      {widthless(text) && <i class="part">·</i>}
    </span>
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
