package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// photograph makes pictures of the first region's live page, in both themes, as
// headless Chromium shows it after so long; the load should still run then.
func (w *world) photograph(ctx context.Context, after time.Duration, folder string, out io.Writer) error {
	browser, err := exec.LookPath("chromium")
	if err != nil {
		fmt.Fprintln(out, "no pictures of the live page: install Debian's package chromium")
		return nil //nolint:nilerr // what there is was checked; only pictures are missing
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	select {
	case <-time.After(after):
	case <-ctx.Done():
		return ctx.Err()
	}
	for theme, scheme := range map[string]string{"dark": "0", "light": "1"} {
		file, err := filepath.Abs(filepath.Join(folder, "live-"+theme+".png"))
		if err != nil {
			return err
		}
		said, err := exec.CommandContext(ctx, browser, "--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1360,1500", "--timeout=3000",
			"--user-data-dir="+filepath.Join(w.dir, "chromium"), "--blink-settings=preferredColorScheme="+scheme,
			"--screenshot="+file, "http://"+w.admins[0]+"/").CombinedOutput()
		if err != nil {
			return fmt.Errorf("chromium: %w: %s", err, said)
		}
		fmt.Fprintln(out, file)
	}
	return nil
}
