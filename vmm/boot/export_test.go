package boot

// For the tests of this folder.
var (
	ParseModinfo   = parseModinfo
	PickPackage    = pickPackage
	ExtractVmlinux = extractVmlinux
	DependsOf      = dependsOf
	Compare        = compareVersions
	ListIn         = listIn
	NewestPackage  = newestPackage
)

// Module makes a module for BuildInitramfs.
func Module(name string, data []byte) module { return module{name, data} }

// BuildInitramfs is buildInitramfs.
func BuildInitramfs(agent []byte, mods ...module) []byte { return buildInitramfs(agent, mods) }
