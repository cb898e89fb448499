/** What the browser does not keep, as where a site's data is blocked, lasts as long as the page is open. */
const unkept = new Map<string, string>();

type Kind = "localStorage" | "sessionStorage";

export function keep(kind: Kind, name: string, value: string): void {
  try {
    window[kind].setItem(name, value);
    unkept.delete(name);
  } catch {
    unkept.set(name, value);
  }
}

export function kept(kind: Kind, name: string): string | null {
  try {
    return unkept.get(name) ?? window[kind].getItem(name);
  } catch {
    return null;
  }
}
