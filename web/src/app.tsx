import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { ApiError, hasKey, setKey, status as askStatus } from "./api";
import { Dashboard } from "./dashboard";
import { Icon } from "./icon";
import { inField } from "./keys";
import { NO_RACE, Race } from "./race";
import { type Run, textOf, useRun } from "./run";
import { asked, DEFAULTS, fromFragment, newSeed, ready, requestBody, SERVERS_CHOICE, type Settings, SHIPPED, toFragment } from "./settings";
import { SettingsPanel } from "./panel";
import { Step } from "./step";
import { currentTheme, toggleTheme } from "./theme";
import type { Status } from "./types";
import { Write } from "./write";

const VIEWS = [
  ["write", "Write"],
  ["step", "Step"],
  ["race", "Race"],
  ["dashboard", "Dashboard"],
] as const;
type View = (typeof VIEWS)[number][0];

const SHORTCUTS: [string, string][] = [
  ["Ctrl + Enter", "run"],
  ["Esc", "stop, or close what is open"],
  ["1 … 4", "views"],
  ["← →  Home  End", "from token to token, and to the numbers between; in Step, from stage to stage"],
  ["Enter", "on a token: its round, step by step"],
  ["Space", "in Step: play and pause"],
  ["T", "dark or light"],
  ["S", "settings"],
  ["?", "this list"],
];

function asView(name: string | undefined): View {
  return VIEWS.find(([view]) => view === name)?.[0] ?? "write";
}

export function App() {
  const first = useRef(fromFragment(location.hash)).current;
  const [settings, setSettings] = useState<Settings>({ ...DEFAULTS, ...first.settings });
  const [view, setView] = useState<View>(asView(first.view));
  const [status, setStatus] = useState<Status | null>(null);
  const [trouble, setTrouble] = useState<{ message: string; key: boolean } | null>(null);
  const [showSettings, setShowSettings] = useState(matchMedia("(min-width: 900px)").matches);
  const [showHelp, setShowHelp] = useState(false);
  const [theme, setTheme] = useState(currentTheme());
  const [round, setRound] = useState(0);
  const { run, begin, stop, clear } = useRun();
  const [ranWith, setRanWith] = useState<Settings | null>(null);
  // The runs of a chat's answers, by their place among the messages.
  const [answers, setAnswers] = useState<Record<number, Run>>({});
  const [race, setRace] = useState(NO_RACE);

  const forgetRun = () => {
    clear();
    setRanWith(null);
  };
  const forget = () => {
    forgetRun();
    setAnswers({});
  };

  // Unasked, it tells only that a key is wanted: that a server can't be reached, the view tells whose request failed.
  const loads = useRef(0);
  const load = useCallback(async (wanted = true) => {
    const own = ++loads.current;
    try {
      setStatus(await askStatus());
      setTrouble(null);
    } catch (error) {
      const key = error instanceof ApiError && error.status === 401;
      if (!key && !wanted) return;
      if (key && own !== loads.current) return; // another key may have been given since
      const which = hasKey() ? "the server does not take this API key: give another one" : "the server asks for an API key";
      setTrouble({ message: key ? which : error instanceof ApiError ? error.message : "the server can't be reached", key });
    }
  }, []);
  useEffect(() => void load(), []);
  const recheck = () => void load(false);

  useEffect(() => {
    const changed = () => {
      const link = fromFragment(location.hash);
      forget();
      setRace(NO_RACE);
      setSettings((old) => ({ ...old, ...SERVERS_CHOICE, ...link.settings }));
      if (link.view) setView(asView(link.view));
    };
    window.addEventListener("hashchange", changed);
    return () => window.removeEventListener("hashchange", changed);
  }, []);

  useEffect(() => {
    const system = matchMedia("(prefers-color-scheme: dark)");
    const changed = () => setTheme(currentTheme());
    system.addEventListener("change", changed);
    return () => system.removeEventListener("change", changed);
  }, []);

  useEffect(() => {
    if (status?.model === SHIPPED.model && settings.prompt === DEFAULTS.prompt && !first.settings.prompt) change({ prompt: SHIPPED.prompt });
  }, [status === null]);
  useEffect(() => {
    // Chat needs a template: a link may ask for it where there is none.
    if (status && !status.has_chat && settings.mode === "chat") setSettings((old) => ({ ...old, mode: "completion" }));
  }, [status, settings.mode]);

  const change = (part: Partial<Settings>) => setSettings((old) => ({ ...old, ...part }));
  const link = (of: Settings = settings) => history.replaceState(null, "", toFragment(of, view));

  // Settled once what became of the last run is in the settings.
  const last = useRef(Promise.resolve());
  const start = () => (last.current = runOnce());
  const runOnce = async () => {
    if (view === "race" || view === "dashboard") return;
    let own = settings;
    if (!ready(own)) return;
    if (own.mode === "chat") own = { ...own, messages: asked(own), question: own.question.trim() ? "" : own.question };
    setSettings(own);
    setRanWith(own);
    setRound(0);
    link(own);
    const done = await begin(requestBody(own, own.messages, true));
    if (done?.error) recheck(); // the server may be another one, or want another key
    if (!done || own.mode !== "chat") return;
    // Questions and answers take turns, as templates want them: what was stopped keeps what it has of an answer. Without
    // any, a question goes back to where it was typed, and one that was asked again keeps the answer that it had.
    const content = done.end?.text ?? textOf(done.rounds);
    if (done.end || content) {
      setAnswers((old) => ({ ...old, [own.messages.length]: done }));
      change({ messages: [...own.messages, { role: "assistant", content }] });
    } else if (settings.messages.length > own.messages.length) {
      change({ messages: settings.messages });
    } else {
      const question = own.messages.at(-1)!.content;
      setSettings((old) => ({ ...old, messages: own.messages.slice(0, -1), question: old.question ? `${question}\n${old.question}` : question }));
    }
  };

  const settle = () => (stop(), last.current);
  // Prompt and chat are kept, each for when it is chosen again.
  const choose = async (mode: Settings["mode"]) => {
    await settle();
    forgetRun();
    change({ mode });
  };

  const stepThrough = (at: number) => {
    setRound(at);
    setView("step");
  };

  // A race is of the present settings, whatever ran before.
  useEffect(() => {
    if (run.end || view !== "dashboard") link((view !== "race" && ranWith) || settings);
  }, [view]);

  useEffect(() => {
    const pressed = (event: KeyboardEvent) => {
      if (showHelp) return; // its keys are the browser's, which closes it and gives back the focus
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        document.querySelector<HTMLButtonElement>("[data-run]")?.click();
      } else if (event.key === "Escape") {
        stop();
        document.querySelector<HTMLButtonElement>("[data-stop]")?.click();
      } else if (!inField(event.target) && !event.ctrlKey && !event.metaKey && !event.altKey) {
        const chosen = VIEWS[Number(event.key) - 1];
        if (chosen) setView(chosen[0]);
        else if (event.key === "?") setShowHelp(true);
        else if (event.key.toLowerCase() === "t") setTheme(toggleTheme());
        else if (event.key.toLowerCase() === "s" && view !== "dashboard") setShowSettings((old) => !old);
      }
    };
    window.addEventListener("keydown", pressed);
    return () => window.removeEventListener("keydown", pressed);
  });

  const shared = { settings, change, status, run, start, stop };
  return (
    <div class="page">
      <header class="top">
        <h1>
          <img src="page/icon.svg" alt="" width="24" height="24" /> Foretoken
          {status && <small title={`${status.model}, drafter ${status.drafter}, verifier ${status.verifier}`}>{status.model}</small>}
        </h1>
        <nav aria-label="Views">
          {VIEWS.map(([name, title], at) => (
            <button
              key={name}
              type="button"
              id={`tab-${name}`}
              aria-current={view === name ? "page" : undefined}
              aria-keyshortcuts={String(at + 1)}
              onClick={() => setView(name)}
            >
              {title}
            </button>
          ))}
        </nav>
        <div class="tools">
          <button type="button" aria-pressed={showSettings && view !== "dashboard"} aria-controls="settings" disabled={view === "dashboard"} onClick={() => setShowSettings(!showSettings)}>
            Settings
          </button>
          <button type="button" onClick={() => setTheme(toggleTheme())} aria-label={`Theme: ${theme}. Change it`}>
            <Icon name={theme === "dark" ? "moon" : "sun"} />
          </button>
          <button type="button" onClick={() => setShowHelp(true)} aria-label="Keyboard shortcuts">
            ?
          </button>
        </div>
      </header>
      {trouble && <Trouble {...trouble} retry={load} />}
      <div class={`body ${showSettings && view !== "dashboard" ? "with-settings" : ""}`}>
        <main>
          {view === "write" && (
            <Write
              {...shared}
              clear={() => {
                if (settings.mode === "completion") return forgetRun();
                forget();
                change({ messages: [], question: "" });
              }}
              choose={choose}
              ranWith={ranWith}
              answers={answers}
              onRound={stepThrough}
            />
          )}
          {view === "step" && <Step run={run} ranWith={ranWith} ready={ready(settings)} round={round} setRound={setRound} start={start} stop={stop} />}
          {view === "race" && <Race settings={settings} status={status} race={race} setRace={setRace} settle={settle} begins={() => link()} failed={recheck} />}
          {view === "dashboard" && <Dashboard refused={recheck} />}
        </main>
        {showSettings && view !== "dashboard" && (
          <SettingsPanel settings={settings} change={change} status={status} link={() => toFragment(settings, view)} dice={() => change({ seed: newSeed() })} />
        )}
      </div>
      {showHelp && <Help close={() => setShowHelp(false)} />}
    </div>
  );
}

function Trouble({ message, key, retry }: { message: string; key: boolean; retry: () => void }) {
  return (
    <form
      class="trouble"
      onSubmit={(event) => {
        event.preventDefault();
        const field = event.currentTarget.querySelector("input");
        if (field) setKey(field.value.trim());
        retry();
      }}
    >
      <span role="alert">{message}</span>
      {key && (
        <input type="password" name="key" aria-label="API key" placeholder="API key" autocomplete="off" pattern="\s*[ -~]*\s*" title="A key has letters, digits and signs of ASCII alone" />
      )}
      <button type="submit">{key ? "Use this key" : "Try again"}</button>
    </form>
  );
}

function Help({ close }: { close: () => void }) {
  const own = useRef<HTMLDialogElement>(null);
  useEffect(() => own.current?.showModal(), []);
  return (
    <dialog ref={own} onClose={close} aria-label="Keyboard shortcuts">
      <h2>Keyboard</h2>
      <dl class="shortcuts">
        {SHORTCUTS.map(([keys, what]) => (
          <div key={keys}>
            <dt>{keys}</dt>
            <dd>{what}</dd>
          </div>
        ))}
      </dl>
      <button type="button" onClick={() => own.current?.close()}>
        Close
      </button>
    </dialog>
  );
}
