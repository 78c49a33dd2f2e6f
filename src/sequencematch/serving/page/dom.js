// Elements of the page and of its pictures, made without markup: text from a model is only ever text.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element with attributes and children; a child that is a string becomes text. */
export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** The same for SVG. */
export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children);
  return element;
}

/** The first element inside `root` with the given `data-part`. */
export function part(root, name) {
  const found = root.querySelector(`[data-part="${name}"]`);
  if (!found) throw new Error(`The page has no part ${name}.`);
  return found;
}

/** A copy of what a template holds. */
export function copyOf(id) {
  return document.getElementById(id).content.firstElementChild.cloneNode(true);
}

/** A probability in percent, without false precision. */
export function percent(probability) {
  const share = 100 * probability;
  if (share >= 99.95 || share === 0) return `${Math.round(share)} %`;
  return share < 0.1 ? "< 0.1 %" : `${share.toFixed(1)} %`;
}
