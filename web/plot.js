// The two plots of the page, as SVG. Their width is that of the place they stand in, so that text keeps its size.

const rowHeight = 30;

/** About what a character of a label takes, and the height of its line. */
const [characterWidth, lineHeight] = [7, 14];

/** Bars of time, one for each row: shorter is better. Rows: { label, value, note, brief, baseline }. */
export function bars(place, rows) {
  const width = widthOf(place);
  const left = 92;
  const right = 12;
  const most = Math.max(...rows.map((row) => row.value)) * 1.02;
  const x = (value) => left + (value / most) * (width - left - right);
  const height = rows.length * rowHeight + 30;
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "time of a decode step at each width; shorter is better" });
  rows.forEach((row, index) => {
    const y = index * rowHeight + 4;
    svg.append(text(row.label, { x: left - 8, y: y + 16, "text-anchor": "end" }));
    svg.append(element("rect", { class: row.baseline ? "baseline" : "bar", x: left, y, width: Math.max(x(row.value) - left, 1), height: rowHeight - 8, rx: 2 }));
    // Next to the bar, or within it; the brief note where there is no room for the other.
    const [behind, within] = [width - x(row.value) - 6, x(row.value) - left - 12];
    const fits = (note, room) => note.length * characterWidth <= room;
    const note = fits(row.note, Math.max(behind, within)) ? row.note : row.brief;
    const place = fits(note, within) ? { x: x(row.value) - 6, "text-anchor": "end", class: row.baseline ? "baseline-text" : "within" } : { x: x(row.value) + 6 };
    svg.append(text(note, { y: y + 16, ...place }));
  });
  const bottom = rows.length * rowHeight;
  svg.append(text("shorter is better", { class: "quiet", x: width - right, y: bottom + 16, "text-anchor": "end" }));
  place.replaceChildren(svg);
}

/** Error against bits per element, the error in powers of ten. Points: { label, bits, error }. An error that has no
 * logarithm has no place there. */
export function curve(place, all) {
  const points = all.filter((point) => Number.isFinite(point.error) && point.error > 0);
  if (points.length === 0) return place.replaceChildren();
  const width = widthOf(place);
  const [left, right, top, bottom, height] = [58, 20, 14, 38, 250];
  const errors = points.map((point) => point.error);
  const low = Math.floor(Math.log10(Math.min(...errors)));
  const high = Math.max(Math.ceil(Math.log10(Math.max(...errors))), low + 1);
  const x = (bits) => left + (bits / 17) * (width - left - right);
  const y = (error) => top + ((high - Math.log10(error)) / (high - low)) * (height - top - bottom);
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "error against bits per element" });
  for (let power = low; power <= high; power += 1) {
    const at = y(10 ** power);
    svg.append(element("line", { class: "axis", x1: left, x2: width - right, y1: at, y2: at }));
    svg.append(text(percent(10 ** power), { class: "quiet", x: left - 6, y: at + 4, "text-anchor": "end" }));
  }
  for (const bits of [0, 4, 8, 12, 16]) {
    svg.append(text(bits, { class: "quiet", x: x(bits), y: height - bottom + 17, "text-anchor": "middle" }));
  }
  svg.append(text("bits per element, ranges included", { class: "quiet", x: width - right, y: height - 4, "text-anchor": "end" }));
  const marks = [...points].sort((a, b) => a.bits - b.bits).map((point) => ({ ...point, x: x(point.bits), y: y(point.error) }));
  svg.append(element("polyline", { class: "curve", points: marks.map((mark) => `${mark.x},${mark.y}`).join(" ") }));
  const taken = marks.map((mark) => ({ left: mark.x - 4.5, right: mark.x + 4.5, top: mark.y - 4.5, bottom: mark.y + 4.5 }));
  for (const point of marks) {
    svg.append(element("circle", { class: "point", cx: point.x, cy: point.y, r: 4.5 }));
    const label = free(point, taken, { left: 0, right: width, top: 0, bottom: height - bottom });
    taken.push(label.box);
    svg.append(text(point.label, { x: label.x, y: label.y, "text-anchor": label.anchor }));
  }
  place.replaceChildren(svg);
}

/** Where a label hides nothing: beside its point on the side that a falling curve leaves free, or elsewhere; there if nowhere. */
function free(point, taken, frame) {
  const wide = point.label.length * characterWidth;
  const places = [[8, -6], [-8, 16], [-8, -6], [8, 16], [10, 4], [-10, 4]].map(([dx, dy]) => {
    const [x, y, anchor] = [point.x + dx, point.y + dy, dx > 0 ? "start" : "end"];
    const left = dx > 0 ? x : x - wide;
    return { x, y, anchor, box: { left, right: left + wide, top: y - lineHeight + 3, bottom: y + 3 } };
  });
  const apart = (a, b) => a.right <= b.left || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top;
  const within = (box) => box.left >= frame.left && box.right <= frame.right && box.top >= frame.top && box.bottom <= frame.bottom;
  return places.find(({ box }) => within(box) && taken.every((other) => apart(box, other))) ?? places[0];
}

/** A number with three digits that say something. */
export function number(value) {
  if (value >= 100) return value.toFixed(0);
  return value.toPrecision(value >= 1 ? 3 : 2);
}

/** A share as percent, tiny ones as a power of ten. */
export function percent(share) {
  return share >= 1e-4 ? `${Number((share * 100).toPrecision(3))} %` : share.toExponential(0);
}

function widthOf(place) {
  return Math.max(Math.round(place.clientWidth), 280);
}

function element(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function text(content, attributes) {
  const made = element("text", attributes);
  made.textContent = content;
  return made;
}
