import { render } from "preact";
import { App } from "./app";
import "./style.css";
import { applyTheme } from "./theme";

applyTheme();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);
render(<App />, document.getElementById("app")!);
