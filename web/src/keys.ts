/** Whether the keys that are pressed are for what has the focus: it is typed into, or chosen from. */
export function inField(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && target.matches("textarea, select, input:not([type=checkbox], [type=range])");
}
