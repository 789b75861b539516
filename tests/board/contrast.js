() => {
  // What of a page is too faint by WCAG 2: texts against the background behind them, colours of runs against the page.
  const channels = (text) => text.match(/[\d.]+/g).map(Number);
  const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const light = (text) => {
    const [r, g, b] = channels(text).map((value) => linear(value / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (one, other) => {
    const [a, b] = [light(one), light(other)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if ((channels(color)[3] ?? 1) === 1) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const wrong = [];
  const check = (node, color, least) => {
    const found = ratio(color, behind(node));
    if (found < least) wrong.push(`${node.tagName}.${node.className}: ${color} ${found.toFixed(2)}`);
  };
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || node.offsetParent === null || node.disabled || ["SCRIPT", "OPTION"].includes(node.tagName)) continue;
    const style = getComputedStyle(node), size = parseFloat(style.fontSize);
    check(node, style.color, size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5);
  }
  for (let i = 0; i < 10; i++) {
    const key = document.createElement("span");
    key.className = `swatch c${i}`;
    document.body.append(key);
    check(document.body, getComputedStyle(key).backgroundColor, 3);
    key.remove();
  }
  return wrong;
};
