import type { ComponentChildren } from "preact";

const W = 420;
const H = 190;
const LEFT = 40;
const BOTTOM = 34;
const TOP = 10;
const RIGHT = 10;

export interface Series {
  name: string;
  points: [number, number][];
}

interface Axes {
  title: string;
  x: string;
  y: string;
  /** Of the y axis. */
  top?: number;
  /** Places of the x axis that have a number, where not chosen by themselves. */
  at?: number[];
  format?: (value: number) => string;
}

/** Round steps that divide a range into about four. */
function ticks(most: number): number[] {
  if (!(most > 0)) return [0, 1];
  const raw = most / 4;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= raw) ?? raw;
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, at) => at * step);
}

function plain(value: number): string {
  return Number(value.toPrecision(3)).toString();
}

function Frame({ title, x, y, most, format = plain, children, legend }: Axes & { most: number; children: ComponentChildren; legend?: ComponentChildren }) {
  const at = (value: number) => TOP + (1 - value / (most || 1)) * (H - TOP - BOTTOM);
  return (
    <figure class="plot">
      <figcaption>{title}</figcaption>
      {legend}
      <svg viewBox={`0 0 ${W} ${H}`} role="img" aria-label={`${title}: ${y} by ${x}`}>
        {ticks(most).map((value) => (
          <g key={value} class="grid">
            <path d={`M${LEFT} ${at(value)} H${W - RIGHT}`} />
            <text x={LEFT - 6} y={at(value)} text-anchor="end" dominant-baseline="central">
              {format(value)}
            </text>
          </g>
        ))}
        {children}
        <text class="axis" x={(LEFT + W - RIGHT) / 2} y={H - 4} text-anchor="middle">
          {x}
        </text>
      </svg>
    </figure>
  );
}

/** Lines through points; at least one series. */
export function Lines({ series, ...axes }: Axes & { series: Series[] }) {
  const points = series.flatMap((one) => one.points);
  const right = Math.max(...points.map(([x]) => x), 1);
  const left = Math.min(...points.map(([x]) => x), right - 1);
  const most = axes.top ?? Math.max(...points.map(([, y]) => y), 0) * 1.08;
  const place = ([x, y]: [number, number]) =>
    `${(LEFT + ((x - left) / (right - left)) * (W - LEFT - RIGHT)).toFixed(1)} ${(TOP + (1 - Math.min(y, most) / (most || 1)) * (H - TOP - BOTTOM)).toFixed(1)}`;
  const marks = axes.at ?? [left, ...ticks(right).filter((value) => value > left && Number.isInteger(value))];
  return (
    <Frame
      {...axes}
      most={most}
      legend={
        series[0]?.name && (
          <ul class="series">
            {series.map((one, at) => (
              <li key={one.name} class={`c${at % 5}`}>
                {one.name}
              </li>
            ))}
          </ul>
        )
      }
    >
      {marks.map((value) => (
        <text key={value} x={LEFT + ((value - left) / (right - left)) * (W - LEFT - RIGHT)} y={H - 20} text-anchor="middle">
          {Math.abs(value)}
        </text>
      ))}
      {series.map((one, at) => (
        <g key={one.name} class={`line c${at % 5}`}>
          <path d={one.points.map((point, i) => `${i ? "L" : "M"}${place(point)}`).join("")} />
          {one.points.length <= 20 &&
            one.points.map((point) => {
              const [cx, cy] = place(point).split(" ");
              return <circle key={point[0]} cx={cx} cy={cy} r="2.4" />;
            })}
        </g>
      ))}
    </Frame>
  );
}

/** Bars, each with its value above it. */
export function Columns({ bars, ...axes }: Axes & { bars: { name: string; value: number; note?: string }[] }) {
  const most = axes.top ?? Math.max(...bars.map((one) => one.value), 0) * 1.12;
  const width = (W - LEFT - RIGHT) / Math.max(bars.length, 1);
  const inner = H - TOP - BOTTOM;
  return (
    <Frame {...axes} most={most}>
      {bars.map((one, at) => {
        const height = (Math.min(one.value, most) / (most || 1)) * inner;
        const x = LEFT + at * width;
        return (
          <g key={one.name} class="column">
            <title>{`${one.name}: ${one.note ?? plain(one.value)}`}</title>
            <rect x={x + width * 0.14} y={TOP + inner - height} width={width * 0.72} height={height} rx="2" />
            {bars.length <= 20 && (
              <text x={x + width / 2} y={H - 20} text-anchor="middle">
                {one.name}
              </text>
            )}
          </g>
        );
      })}
    </Frame>
  );
}
