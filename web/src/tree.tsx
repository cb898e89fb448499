import { label, share } from "./format";
import type { Round } from "./types";

const WIDTH = 92;
const HEIGHT = 34;

interface Node {
  x: number;
  y: number;
  parent: number;
}

/** Columns by depth; leaves one below the other, and each parent level with the middle of its children. */
function layout(parents: number[]): { nodes: Node[]; width: number; height: number } {
  const children: number[][] = [[], ...parents.map(() => [])];
  parents.forEach((parent, index) => children[parent]!.push(index + 1));
  const nodes: Node[] = [0, ...parents].map(() => ({ x: 0, y: 0, parent: -1 }));
  let row = 0;
  let deepest = 0;
  const place = (node: number, depth: number): number => {
    deepest = Math.max(deepest, depth);
    const ys = children[node]!.map((child) => place(child, depth + 1));
    const y = ys.length ? (ys[0]! + ys[ys.length - 1]!) / 2 : row++;
    nodes[node] = { x: depth, y, parent: node ? parents[node - 1]! : -1 };
    return y;
  };
  place(0, 0);
  return { nodes, width: (deepest + 1) * WIDTH, height: row * HEIGHT };
}

interface Props {
  round: Round;
  selected?: number;
  onSelect?: (node: number) => void;
  /** Which verdicts are shown: none while the round is only drafted. */
  decided?: boolean;
}

/** A draft as a tree, drawn from left to right; node 0 is the last token of the sequence. */
export function Tree({ round, selected, onSelect, decided = true }: Props) {
  const draft = round.draft ?? [];
  const { nodes, width, height } = layout(draft.map((token) => token.parent));
  const kind = (node: number) => (node === 0 ? "root" : !decided ? "drafted" : draft[node - 1]!.accepted ? "accepted" : "rejected");
  const name = (node: number) => (node === 0 ? "root" : label(draft[node - 1]!.text, draft[node - 1]!.id));
  const cut = (text: string) => (text.length > 10 ? `${text.slice(0, 9)}…` : text);
  return (
    <svg class="tree" viewBox={`0 0 ${width} ${height}`} role={onSelect ? "group" : "img"} aria-label="Draft tree" ref={(svg) => {
      if (svg) svg.style.setProperty("--natural", `${width}px`);
    }}>
      {nodes.slice(1).map((node, at) => {
        const from = nodes[node.parent]!;
        const x = from.x * WIDTH + WIDTH - 14;
        const end = node.x * WIDTH;
        const [y0, y1] = [from.y * HEIGHT + HEIGHT / 2, node.y * HEIGHT + HEIGHT / 2];
        return <path key={at} class={`edge ${kind(at + 1)}`} d={`M${x} ${y0} C${(x + end) / 2} ${y0} ${(x + end) / 2} ${y1} ${end} ${y1}`} />;
      })}
      {nodes.map((node, at) => (
        <g
          key={at}
          class={`node ${kind(at)} ${selected === at ? "selected" : ""}`}
          transform={`translate(${node.x * WIDTH} ${node.y * HEIGHT + 4})`}
          {...(onSelect && at > 0
            ? {
                tabIndex: 0,
                role: "button",
                "aria-label": `${name(at)}, ${kind(at)}, p ${share(draft[at - 1]!.p)}, q ${share(draft[at - 1]!.q)}`,
                onClick: () => onSelect(at),
                onFocus: () => onSelect(at),
              }
            : {})}
        >
          <rect width={WIDTH - 14} height={HEIGHT - 8} rx="6" />
          <text x={(WIDTH - 14) / 2} y={(HEIGHT - 8) / 2} text-anchor="middle" dominant-baseline="central">
            {cut(name(at))}
          </text>
        </g>
      ))}
    </svg>
  );
}
