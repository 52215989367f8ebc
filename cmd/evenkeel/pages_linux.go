package main

import (
	"bufio"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// forgetProgram has the kernel drop the pages of the program file that this process has
// read, as the kernel may do at any time by itself. What runs comes back from the page
// cache, 64 KiB at once. A start reads most of the file, because every package prepares
// its tables then, those of the other subcommands, too; serve needs a third of it afterwards.
//
// A part of the program that differs from the file stays: a debugger may have written to it.
func forgetProgram() error {
	program, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return err
	}
	maps, err := os.Open("/proc/self/smaps")
	if err != nil {
		return err
	}
	defer func() { _ = maps.Close() }()
	var from, to uintptr // of the part that the lines are about
	lines := bufio.NewScanner(maps)
	for lines.Scan() {
		line := lines.Text()
		fields := strings.Fields(line)
		switch {
		case !strings.HasSuffix(fields[0], ":"): // the line that a part begins with
			if from, to = 0, 0; strings.HasPrefix(fields[1], "r-") && strings.HasSuffix(line, " "+program) {
				if _, err := fmt.Sscanf(fields[0], "%x-%x", &from, &to); err != nil {
					return err
				}
			}
		case fields[0] == "Anonymous:" && fields[1] == "0" && from < to:
			if _, _, errno := unix.Syscall(unix.SYS_MADVISE, from, to-from, unix.MADV_DONTNEED); errno != 0 {
				return fmt.Errorf("madvise: %w", errno)
			}
		}
	}
	return lines.Err()
}
