package main

import (
	"bufio"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// dropProgramPages saves memory: it makes the kernel drop the pages of the program file from this
// process. A page that is used again comes back from the page cache. Most of the file is read at
// the start, because every package prepares its tables, even packages of other subcommands.
// Afterwards, serve needs only a third of the file.
//
// A part of the program in memory that differs from the file is not dropped, because a debugger may
// have written to it.
func dropProgramPages() error {
	program, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return err
	}
	maps, err := os.Open("/proc/self/smaps")
	if err != nil {
		return err
	}
	defer func() { _ = maps.Close() }()
	var from, to uintptr // address range of the program that the current lines describe; 0: they describe something else
	lines := bufio.NewScanner(maps)
	for lines.Scan() {
		line := lines.Text()
		fields := strings.Fields(line)
		switch {
		case !strings.HasSuffix(fields[0], ":"): // the first line about an address range; the lines below it have a key with a colon
			from, to = 0, 0
			isProgram := strings.HasPrefix(fields[1], "r-") && strings.HasSuffix(line, " "+program) // mapped read-only from the program file
			if isProgram {
				if _, err := fmt.Sscanf(fields[0], "%x-%x", &from, &to); err != nil {
					return err
				}
			}
		case fields[0] == "Anonymous:" && fields[1] == "0" && from < to: // no page of the range differs from the file
			if _, _, errno := unix.Syscall(unix.SYS_MADVISE, from, to-from, unix.MADV_DONTNEED); errno != 0 {
				return fmt.Errorf("madvise: %w", errno)
			}
		}
	}
	return lines.Err()
}
