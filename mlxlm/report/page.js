"use strict";
// Shows the values under the pointer. The charts don't need it.
const readout = document.getElementById("readout");

function formatValue(value, unit) {
  const scaled = (units) => {
    let i = 0;
    while (Math.abs(value) >= 999.5 && i < units.length - 1) { value /= 1000; i += 1; }
    return Number(value.toPrecision(4)) + units[i];
  };
  if (unit === "bytes") return scaled([" B", " kB", " MB", " GB", " TB"]);
  if (unit === "tokens") return scaled(["", "k", "M", "B", "T"]) + " tokens";
  if (unit === "seconds") {
    const s = Math.round(value);
    return s < 60 ? `${s}s` : s < 3600 ? `${Math.floor(s / 60)}m${s % 60}s` : `${Math.floor(s / 3600)}h${Math.floor(s % 3600 / 60)}m`;
  }
  return String(Number(value.toPrecision(5)));
}

for (const chart of document.querySelectorAll("figure svg[data-plot]")) {
  const [left, top, right, bottom] = chart.dataset.plot.split(" ").map(Number);
  const [x0, x1] = chart.dataset.x.split(" ").map(Number);
  const [y0, y1] = chart.dataset.y.split(" ").map(Number);
  const curves = [...chart.querySelectorAll("polyline")];
  const places = curves.map(() => null);
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "path");
  cursor.setAttribute("class", "cursor");
  chart.append(cursor);

  const valueAt = (y) => {
    const share = 1 - y / (bottom - top);
    return chart.dataset.log === "1" ? y0 * Math.pow(y1 / y0, share) : y0 + share * (y1 - y0);
  };
  const nearest = (i, x) => {
    places[i] ??= curves[i].getAttribute("points").split(" ").map((p) => p.split(",").map(Number));
    return places[i].reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
  };
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * chart.viewBox.baseVal.width;
    if (x < left || x > right) return;
    cursor.setAttribute("d", `M${x} ${top}V${bottom}`);
    const lines = [formatValue(x0 + (x - left) / (right - left) * (x1 - x0), chart.dataset.xUnit)];
    curves.forEach((curve, i) => {
      lines.push(`${curve.dataset.name}  ${formatValue(valueAt(nearest(i, x - left)[1]), chart.dataset.yUnit)}`);
    });
    readout.textContent = lines.join("\n");
    readout.style.display = "block";
    readout.style.left = `${Math.max(0, Math.min(event.clientX + 12, innerWidth - readout.offsetWidth - 8))}px`;
    readout.style.top = `${Math.min(event.clientY + 12, innerHeight - readout.offsetHeight - 8)}px`;
  });
  chart.addEventListener("pointerleave", () => {
    readout.style.display = "none";
    cursor.removeAttribute("d");
  });
}
