(element, right, down) => {
    const around = element ?? document.elementFromPoint(innerWidth / 2, innerHeight / 2);
    const up = node => node.assignedSlot ?? node.parentElement ?? node.getRootNode().host;
    const places = node => [node.scrollLeft, node.scrollTop].join();
    const can = node => node === document.scrollingElement
        || /auto|scroll/.test(getComputedStyle(node).overflowX + getComputedStyle(node).overflowY);
    for (let node = around; node; node = up(node)) {
        if (!can(node)) continue;
        const before = places(node);
        node.scrollBy({left: right, top: down, behavior: 'instant'});
        if (places(node) !== before) return 1;
    }
    document.scrollingElement?.scrollBy({left: right, top: down, behavior: 'instant'});
    return 0;
}
