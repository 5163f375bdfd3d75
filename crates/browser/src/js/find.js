// Walks through the shadow roots of the document, and looks for texts and elements in it.
{
  const {number, calls} = sandpool;

  // Yields every known shadow root below `top`, outermost first.
  const roots = function* (top) {
    const queue = [top];
    for (let root; (root = queue.shift()); ) {
      const walker = document.createTreeWalker(root, NodeFilter.SHOW_ELEMENT);
      for (let element; (element = walker.nextNode()); ) {
        const inner = sandpool.root(element);
        if (!inner) continue;
        yield inner;
        queue.push(inner);
      }
    }
  };

  // Returns whether a text is visible. Differences in white space do not matter.
  calls.has = text => {
    const plain = text => text.replace(/\s+/g, ' ');
    const wanted = plain(text).trim();
    const seen = element => plain(element.innerText ?? '').includes(wanted);
    if (!document.body) return false;
    if (seen(document.body)) return true;
    for (const root of roots(document)) if ([...root.children].some(seen)) return true;
    return false;
  };

  // Returns the number of an element that the driver has as a remote object, such as the owner of a frame.
  calls.number = element => number(element);

  calls.alive = number => void sandpool.node(number);

  sandpool.roots = roots;
}
