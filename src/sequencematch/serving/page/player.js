// The clock of the page: at which step the runs are shown. It plays, pauses, and follows a run that still grows.

/** Milliseconds of one action at speed 1. */
export const ACTION_MS = 420;

/** A player; `onChange` is called whenever its step, its length or its playing changes. */
export function createPlayer(onChange) {
  let timer = null;
  const player = { step: 0, length: 0, speed: 1, isPlaying: false, isLive: false };

  const stop = () => {
    clearTimeout(timer);
    timer = null;
  };
  const tick = () => {
    timer = null;
    if (!player.isPlaying) return;
    if (player.step < player.length) player.step += 1;
    settle();
    onChange();
  };
  // Wait for the next action; at the end of a run that does not grow any more, pause.
  const settle = () => {
    if (player.step >= player.length) {
      if (!player.isLive) player.isPlaying = false;
    } else if (player.isPlaying && timer === null) {
      timer = setTimeout(tick, ACTION_MS / player.speed);
    }
  };

  /** Go to a step and stay there. */
  player.seek = (step) => {
    stop();
    player.isPlaying = false;
    player.step = Math.min(Math.max(0, step), player.length);
    onChange();
  };
  /** Play on, or from the start if all has been shown. */
  player.play = () => {
    if (player.step >= player.length && !player.isLive) player.step = 0;
    player.isPlaying = true;
    settle();
    onChange();
  };
  player.pause = () => {
    stop();
    player.isPlaying = false;
    onChange();
  };
  player.toggle = () => (player.isPlaying ? player.pause() : player.play());
  /** Begin again with a run that has just been asked for. */
  player.restart = () => {
    stop();
    Object.assign(player, { step: 0, length: 0, isPlaying: true, isLive: true });
    onChange();
  };
  /** The longest run has `length` actions now; `isLive` says whether more may come. */
  player.grow = (length, isLive) => {
    Object.assign(player, { length, isLive, step: Math.min(player.step, length) });
    if (player.isPlaying && player.speed === Infinity) player.step = length;
    settle();
    onChange();
  };
  player.setSpeed = (speed) => {
    player.speed = speed;
    if (timer !== null) {
      stop();
      settle();
    }
  };
  return player;
}
