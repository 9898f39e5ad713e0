// Copies texts, and draws the charts in the colors of the page: light, dark or paper.
for (const button of document.querySelectorAll(".copyable button"))
  button.addEventListener("click", async () => {
    const code = button.previousElementSibling;
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch { // a sandboxed frame, such as MLflow's, has no clipboard
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
    }
    button.textContent = "copied";
  });

const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function themed(layout) {
  const [text, line, card] = [color("--text"), color("--line"), color("--card")];
  const colors = {
    "font.color": text, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    "hoverlabel.bgcolor": card, "hoverlabel.font.color": text,
  };
  for (const axis of Object.keys(layout).filter(key => /^[xy]axis/.test(key)))
    Object.assign(colors, { [`${axis}.gridcolor`]: line, [`${axis}.linecolor`]: line, [`${axis}.tickcolor`]: line });
  return colors;
}

async function drawCharts(compressed) {
  const bytes = Uint8Array.from(atob(compressed), character => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
  const plots = [...document.querySelectorAll(".plot")];
  for (const plot of plots) {
    const { data, layout } = JSON.parse(plot.nextElementSibling.textContent);
    await Plotly.newPlot(plot, data, { ...layout, autosize: true }, { responsive: true, displayModeBar: false });
  }
  const restyle = size => plots.forEach(plot => Plotly.relayout(plot, { ...themed(plot.layout), ...size }));
  restyle({});
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => restyle({}));
  const paper = matchMedia("print"); // the width of a sheet is unknown to the script
  const onPaper = () => restyle(paper.matches ? { width: 680, autosize: false } : { width: null, autosize: true });
  paper.addEventListener("change", onPaper);
  document.body.dataset.drawn = plots.length;
}

const library = document.getElementById("plotly");
if (library)
  drawCharts(library.textContent).catch(error => {
    for (const plot of document.querySelectorAll(".plot"))
      plot.textContent = `The charts need a browser of 2023 or later: ${error}`;
  });
