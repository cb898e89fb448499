const PATHS = {
  first: "M4 3v10M13 3L7 8l6 5z",
  back: "M11 3L5 8l6 5z",
  play: "M5 2.5v11l8.5-5.5z",
  pause: "M5 3v10M11 3v10",
  forward: "M5 3l6 5-6 5z",
  last: "M12 3v10M3 3l6 5-6 5z",
  close: "M4 4l8 8M12 4l-8 8",
  sun: "M8 5.2a2.8 2.8 0 1 0 0 5.6a2.8 2.8 0 0 0 0-5.6M8 1v1.6M8 13.4V15M1 8h1.6M13.4 8H15M3 3l1.2 1.2M11.8 11.8L13 13M3 13l1.2-1.2M11.8 4.2L13 3",
  moon: "M13 9.6A5.6 5.6 0 1 1 6.4 3A4.6 4.6 0 0 0 13 9.6z",
  dice: "M3 3h10v10H3zM5.6 5.6h.01M10.4 5.6h.01M8 8h.01M5.6 10.4h.01M10.4 10.4h.01",
} as const;

/** Drawn here, since fonts differ in the signs they have. */
export function Icon({ name }: { name: keyof typeof PATHS }) {
  return (
    <svg class={`icon ${name}`} viewBox="0 0 16 16" aria-hidden="true">
      <path d={PATHS[name]} />
    </svg>
  );
}
