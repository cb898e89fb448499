import { useState } from "preact/hooks";
import { Icon } from "./icon";
import type { Settings, Speculation } from "./settings";
import type { Status } from "./types";

const LENGTHS = ["0", "1", "2", "3", "4", "5", "6", "8", "12", "16"];

interface Props {
  settings: Settings;
  change: (part: Partial<Settings>) => void;
  status: Status | null;
  link: () => string;
  dice: () => void;
}

/** All settings of a run, and the link that holds them. */
export function SettingsPanel({ settings, change, status, link, dice }: Props) {
  const [copied, setCopied] = useState("");
  const number = (name: "temperature" | "topP" | "maxTokens" | "seed", title: string, low: number, high: number, step: number) => (
    <NumberField name={name} title={title} value={settings[name]} low={low} high={high} step={step} change={(value) => change({ [name]: value })} />
  );
  const copy = async () => {
    history.replaceState(null, "", link());
    try {
      await navigator.clipboard.writeText(location.href);
      setCopied("It is in the clipboard");
    } catch {
      setCopied("It is in the address bar"); // copying is not allowed without HTTPS
    }
    setTimeout(() => setCopied(""), 1500);
  };
  return (
    <aside id="settings" class="settings" aria-label="Settings">
      <fieldset>
        <legend>Sampling</legend>
        {number("temperature", "Temperature", 0, 10, 0.1)}
        {number("topP", "Top-p", 0.01, 1, 0.01)}
        {number("maxTokens", "Max tokens", 1, status?.max_tokens ?? 2048, 1)}
        <div class="with-button">
          {number("seed", "Seed", 0, Number.MAX_SAFE_INTEGER, 1)}
          <button type="button" onClick={dice} aria-label="Another seed">
            <Icon name="dice" />
          </button>
        </div>
      </fieldset>
      <fieldset>
        <legend>Speculation</legend>
        <SpeculationFields value={settings} change={change} status={status} />
      </fieldset>
      <button type="button" onClick={copy}>
        {copied || "Copy a link to this run"}
      </button>
      <p class="hint">The link holds prompt, seed and settings: the same output again, on this server.</p>
    </aside>
  );
}

interface NumberProps {
  name: string;
  title: string;
  value: number;
  low: number;
  high: number;
  step: number;
  change: (value: number) => void;
}

/** A number that counts as soon as it is typed; the field keeps what was typed until it is left. */
function NumberField({ name, title, value, low, high, step, change }: NumberProps) {
  const [typed, setTyped] = useState<string | null>(null);
  return (
    <label>
      <span>{title}</span>
      <input
        type="number"
        name={name}
        value={typed ?? value}
        min={low}
        max={high}
        step={step}
        onInput={(event) => {
          const given = event.currentTarget.valueAsNumber;
          setTyped(event.currentTarget.value);
          if (Number.isFinite(given)) change(Math.min(Math.max(step === 1 ? Math.round(given) : given, low), high));
        }}
        onChange={() => setTyped(null)}
        onBlur={() => setTyped(null)}
      />
    </label>
  );
}

interface FieldsProps {
  value: Speculation;
  change: (part: Partial<Speculation>) => void;
  status: Status | null;
}

/** Drafter, draft length, trees or chains, and verifier. */
export function SpeculationFields({ value, change, status }: FieldsProps) {
  const lengths = LENGTHS.includes(value.length) || ["", "auto"].includes(value.length) ? LENGTHS : [...LENGTHS, value.length];
  const offered = (names: string[], own: string, chosen: string) => {
    const others = names.filter((name) => name !== own);
    return chosen && !others.includes(chosen) ? [...others, chosen] : others; // a link may name any
  };
  const verifier = value.verifier || status?.verifier || "";
  const takesTrees = !status || status.tree_verifiers.includes(verifier);
  return (
    <>
      {status && (status.drafters.length > 1 || value.drafter) && (
        <label>
          <span>Drafter</span>
          <select name="drafter" value={value.drafter} onChange={(event) => change({ drafter: event.currentTarget.value })}>
            <option value="">{status.drafter === "cascade" ? "auto: what pays" : `default: ${status.drafter}`}</option>
            {offered(status.drafters, status.drafter, value.drafter).map((name) => (
              <option key={name}>{name}</option>
            ))}
          </select>
        </label>
      )}
      <label>
        <span>Draft length</span>
        <select name="length" value={value.length} onChange={(event) => change({ length: event.currentTarget.value })}>
          <option value="">{status ? `default: ${status.num_speculative_tokens}` : "default"}</option>
          {status?.num_speculative_tokens !== "auto" && <option value="auto">auto: what pays</option>}
          {lengths.map((length) => (
            <option key={length} value={length}>
              {length === "0" ? "0: plain decoding" : length}
            </option>
          ))}
        </select>
      </label>
      {status?.trees && (
        <label>
          <span>Drafts</span>
          <select name="tree" value={value.tree} onChange={(event) => change({ tree: event.currentTarget.value })}>
            <option value="">{`default: ${takesTrees ? "trees" : "chains"}`}</option>
            <option value="none">chains</option>
          </select>
        </label>
      )}
      <label>
        <span>Verifier</span>
        <select name="verifier" value={value.verifier} onChange={(event) => change({ verifier: event.currentTarget.value })}>
          <option value="">{status ? `default: ${status.verifier}` : "default"}</option>
          {status && offered(status.verifiers, status.verifier, value.verifier).map((name) => (
            <option key={name}>{name}</option>
          ))}
        </select>
      </label>
      {status?.trees && !takesTrees && <p class="hint">{`Verifier ${verifier} takes chains alone.`}</p>}
    </>
  );
}
