const answer: number = 42;
document.body.append(String(answer));
