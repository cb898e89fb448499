import { createHash } from "node:crypto";
import { copyFileSync, readdirSync, readFileSync, statSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { defineConfig } from "vite";

const OUT = "../src/foretoken/serve/page";

/** SHA-256 of the sources' names and contents; a test computes the same, so that a stale build is found. */
function sourcesHash(): string {
  const list = (folder: string): string[] =>
    readdirSync(folder).flatMap((name) => {
      const path = `${folder}/${name}`;
      return statSync(path).isDirectory() ? list(path) : [path];
    });
  const files = ["index.html", "package-lock.json", "package.json", "tsconfig.json", "vite.config.ts"];
  files.push(...list("src"), ...list("public"));
  const hash = createHash("sha256");
  for (const file of files.sort()) {
    hash.update(`${file}\0`);
    hash.update(readFileSync(file));
    hash.update("\0");
  }
  return hash.digest("hex");
}

export default defineConfig({
  base: "./",
  build: {
    outDir: OUT,
    emptyOutDir: true,
    modulePreload: false,
    target: "es2022",
    rollupOptions: {
      output: { entryFileNames: "app.js", assetFileNames: "app[extname]", codeSplitting: false },
    },
  },
  plugins: [
    {
      name: "sources-hash-and-licence",
      closeBundle() {
        copyFileSync("node_modules/preact/LICENSE", join(OUT, "preact.LICENSE")); // its code is in app.js
        writeFileSync(join(OUT, "sources.sha256"), `${sourcesHash()}\n`);
      },
    },
    {
      // The server has the page at / and its files under /page/.
      name: "page-folder",
      enforce: "post",
      transformIndexHtml: {
        order: "post",
        handler: (html: string) => html.replaceAll('"./', '"./page/').replaceAll(" crossorigin", ""),
      },
    },
  ],
});
